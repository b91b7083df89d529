// Kernels for bfloat16 models on x86 processors with AVX512-BF16.
//
// Weights stay as the model has them, [out, in] row by row: a product's numbers are dot products of
// rows, 16 of them summed across lanes together, and what the next rows need is prefetched while
// these are multiplied. Each dot product adds up in the same order whatever stands beside it, so a
// row's result does not depend on the batch.
//
// Products are exact, sums are in float32; what Transformers' code rounds to bfloat16 in between is
// rounded here too, in the same places. Pointers need no alignment. Nothing here checks anything:
// the callers in cpu.py and decoder.py do.
//
// What ends in _by_team is called by all threads of a team with the same arguments, and returns when
// all of it is done. So one team can go through many of them, and be woken once.

#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef __AVX512BF16__
#error "this processor has no AVX512-BF16"
#endif

typedef uint16_t bf16;

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

// Fewer multiplications than this are not worth waking other threads for.
#define PARALLEL_WORK 65536

INLINE __m512bh load_pairs(const bf16 *p, __mmask32 mask) {
    return (__m512bh)_mm512_maskz_loadu_epi16(mask, p);
}

INLINE __m512 widen(__m256i v) {
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16);
}

INLINE __m512 load_wide(const bf16 *p) { return widen(_mm256_loadu_si256((const __m256i *)p)); }

INLINE __m512 load_wide_some(const bf16 *p, __mmask16 mask) {
    return widen(_mm256_maskz_loadu_epi16(mask, p));
}

INLINE __m256i narrow(__m512 v) { return (__m256i)_mm512_cvtneps_pbh(v); }

INLINE __m512 rounded(__m512 v) { return widen(narrow(v)); }

INLINE float wide(bf16 v) {
    uint32_t bits = (uint32_t)v << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

INLINE __mmask16 first(long count) {
    return count >= 16 ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1);
}

INLINE __mmask32 first_32(long count) {
    return count >= 32 ? 0xffffffffu : (1u << count) - 1;
}

// The sums of 16 vectors' lanes, in their order. All take the same tree.
INLINE __m512 sum_lanes(const __m512 *v) {
    __m512 a[8], b[4], c[2];
    UNROLL for (int i = 0; i < 8; i++)
        a[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]),
                             _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    UNROLL for (int i = 0; i < 4; i++) {
        __m512d x = (__m512d)a[2 * i], y = (__m512d)a[2 * i + 1];
        b[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(x, y), (__m512)_mm512_unpackhi_pd(x, y));
    }
    UNROLL for (int i = 0; i < 2; i++)
        c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88),
                         _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
}

// exp to about 1e-7 relative; 0 below the least float, for -inf too. NaN stays NaN: where one
// operand is no number, minimum and maximum give the second. Range reduction and minimax polynomial
// after Cephes' expf (Moshier).
INLINE __m512 exponential(__m512 x) {
    x = _mm512_min_ps(_mm512_set1_ps(88.7f), x);
    x = _mm512_max_ps(_mm512_set1_ps(-104.0f), x);
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 0);
    x = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    x = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), x);
    __m512 y = _mm512_set1_ps(1.9875691500e-4f);
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(1.3981999507e-3f));
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(8.3334519073e-3f));
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(4.1665795894e-2f));
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(1.6666665459e-1f));
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(5.0000001201e-1f));
    y = _mm512_fmadd_ps(y, _mm512_mul_ps(x, x), _mm512_add_ps(x, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(y, n);
}

// tanh(x) = 1 - 2 / (exp(2x) + 1)
INLINE __m512 hyperbolic_tangent(__m512 x) {
    __m512 one = _mm512_set1_ps(1.0f);
    __m512 e = exponential(_mm512_add_ps(x, x));
    return _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(e, one)));
}

// --- linear layers -----------------------------------------------------------------------------

enum { PLAIN, WIDE, GATED_SILU, GATED_TANH_GELU };

// One or more linear layers over the same rows, their outputs side by side. The gated kinds have
// two parts, gate and up, without bias, and one output, act(gate) * up. WIDE writes float32 instead
// of bfloat16.
typedef struct {
    const bf16 *weight[3];  // [outputs, inputs]
    const bf16 *bias[3];    // [outputs], or NULL
    long outputs[3];
    long parts;
    long inputs;
    long kind;
} Linear;

INLINE __m512 activate(__m512 x, long kind) {
    __m512 one = _mm512_set1_ps(1.0f);
    if (kind == GATED_SILU) {
        __m512 e = exponential(_mm512_sub_ps(_mm512_setzero_ps(), x));
        return _mm512_div_ps(x, _mm512_add_ps(one, e));
    }
    __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
    __m512 inner = _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x);
    __m512 t = hyperbolic_tangent(_mm512_mul_ps(inner, _mm512_set1_ps(0.7978845608028654f)));
    return _mm512_mul_ps(_mm512_mul_ps(x, _mm512_set1_ps(0.5f)), _mm512_add_ps(one, t));
}

// A step of dot_products: 32 products of each pair of rows, or fewer by the mask.
INLINE void add_products(int rows, int columns, const bf16 *x, const bf16 *weight, long k,
                         __mmask32 mask, __m512 *sums) {
    __m512bh values[4];
    UNROLL for (int a = 0; a < rows; a++) values[a] = load_pairs(x + a * k, mask);
    UNROLL for (int b = 0; b < columns; b++) {
        __m512bh weights = load_pairs(weight + b * k, mask);
        UNROLL for (int a = 0; a < rows; a++)
            sums[a * columns + b] = _mm512_dpbf16_ps(sums[a * columns + b], values[a], weights);
    }
}

// Dot products of `rows` rows of x with `columns` rows of weights, rows * columns <= 16: lane
// a * columns + b has that of a and b. With each step `lines` cache lines from `ahead` on are
// brought closer.
INLINE __m512 dot_products(int rows, int columns, const bf16 *x, const bf16 *weight, long k,
                           const bf16 *ahead, long lines) {
    __m512 sums[16];
    UNROLL for (int i = 0; i < 16; i++) sums[i] = _mm512_setzero_ps();
    long i = 0;
    for (; i + 32 <= k; i += 32) {
        add_products(rows, columns, x + i, weight + i, k, 0xffffffffu, sums);
        for (long line = 0; line < lines; line++, ahead += 32)
            _mm_prefetch((const char *)ahead, _MM_HINT_T1);
    }
    if (i < k) add_products(rows, columns, x + i, weight + i, k, first_32(k - i), sums);
    return sum_lanes(sums);
}

// Where a part's outputs go: rows `stride` numbers apart. What is in `added` at the same places is
// added to them, unless it is NULL.
typedef struct {
    char *out;
    const bf16 *added;
    long stride;
} Target;

// The same for so few rows that reading the weights takes longer than multiplying: weights are read
// in the order in which they lie.
INLINE __m512 dot_products_in_order(int rows, int columns, const bf16 *x, const bf16 *weight,
                                    long k) {
    __m512 sums[16];
    UNROLL for (int i = 0; i < 16; i++) sums[i] = _mm512_setzero_ps();
    UNROLL for (int b = 0; b < columns; b++) {
        __m512 of_row[4];
        UNROLL for (int a = 0; a < rows; a++) of_row[a] = _mm512_setzero_ps();
        long i = 0;
        for (; i + 32 <= k; i += 32) {
            add_products(rows, 1, x + i, weight + b * k + i, k, 0xffffffffu, of_row);
            _mm_prefetch((const char *)(weight + b * k + i) + 2048, _MM_HINT_T1);
        }
        if (i < k) add_products(rows, 1, x + i, weight + b * k + i, k, first_32(k - i), of_row);
        UNROLL for (int a = 0; a < rows; a++) sums[a * columns + b] = of_row[a];
    }
    return sum_lanes(sums);
}

// One tile of outputs: `rows` rows, and `columns` weights from `column` on. With `in_order` as in
// dot_products_in_order.
INLINE void multiply_tile(int rows, int columns, const Linear *l, long part, const bf16 *x,
                          Target to, long column, int in_order, const bf16 *ahead, long lines) {
    const long k = l->inputs;
    const bf16 *weight = l->weight[part] + column * k;
    __m512 sums = in_order ? dot_products_in_order(rows, columns, x, weight, k)
                           : dot_products(rows, columns, x, weight, k, ahead, lines);
    if (l->bias[part]) {
        float bias[16] = {0};
        UNROLL for (int i = 0; i < rows * columns; i++)
            bias[i] = wide(l->bias[part][column + i % columns]);
        sums = _mm512_add_ps(sums, _mm512_loadu_ps(bias));
    }
    if (l->kind >= GATED_SILU) {
        __m512 gate = rounded(activate(rounded(sums), l->kind));
        const bf16 *other = l->weight[1] + column * k;
        const bf16 *other_ahead = ahead ? other + (ahead - weight) : NULL;
        __m512 up = in_order ? dot_products_in_order(rows, columns, x, other, k)
                             : dot_products(rows, columns, x, other, k, other_ahead, lines);
        sums = _mm512_mul_ps(gate, rounded(up));
    }
    if (to.added) {
        bf16 added[16] = {0};
        UNROLL for (int a = 0; a < rows; a++)
            memcpy(added + a * columns, to.added + a * to.stride + column, columns * sizeof(bf16));
        sums = _mm512_add_ps(rounded(sums), load_wide(added));
    }
    if (l->kind == WIDE) {
        float result[16];
        _mm512_storeu_ps(result, rounded(sums));
        UNROLL for (int a = 0; a < rows; a++)
            memcpy((float *)to.out + a * to.stride + column, result + a * columns,
                   columns * sizeof(float));
    } else {
        bf16 result[16];
        _mm256_storeu_si256((__m256i *)result, narrow(sums));
        UNROLL for (int a = 0; a < rows; a++)
            memcpy((bf16 *)to.out + a * to.stride + column, result + a * columns,
                   columns * sizeof(bf16));
    }
}

// Outputs `start` to `stop` of some rows, in tiles of so many columns and the rest one by one.
INLINE void multiply_rows(int rows, int columns, const Linear *l, long part, const bf16 *x,
                          Target to, long start, long stop, int in_order, const bf16 *ahead,
                          long lines) {
    long column = start;
    for (; column + columns <= stop; column += columns)
        multiply_tile(rows, columns, l, part, x, to, column, in_order, ahead, lines);
    for (; column < stop; column++) multiply_tile(rows, 1, l, part, x, to, column, 0, NULL, 0);
}

// The same, of up to four rows.
INLINE void multiply_four(const Linear *l, long part, const bf16 *x, Target to, long rows,
                          long start, long stop, const bf16 *ahead, long lines) {
    switch (rows) {
    case 1: multiply_rows(1, 4, l, part, x, to, start, stop, 0, ahead, lines); break;
    case 2: multiply_rows(2, 4, l, part, x, to, start, stop, 0, ahead, lines); break;
    case 3: multiply_rows(3, 4, l, part, x, to, start, stop, 0, ahead, lines); break;
    default: multiply_rows(4, 4, l, part, x, to, start, stop, 0, ahead, lines); break;
    }
}

INLINE Target at_row(Target to, long row, long width) {
    to.out += row * to.stride * width;
    if (to.added) to.added += row * to.stride;
    return to;
}

// Numbers in a row of the output.
INLINE long row_width(const Linear *l) {
    const long parts = l->kind >= GATED_SILU ? 1 : l->parts;
    long width = 0;
    for (long part = 0; part < parts; part++) width += l->outputs[part];
    return width;
}

static void linear_by_team(const Linear *l, const bf16 *x, long rows, const bf16 *added,
                           void *out) {
    const long k = l->inputs, parts = l->kind >= GATED_SILU ? 1 : l->parts;
    const long width = l->kind == WIDE ? sizeof(float) : sizeof(bf16);
    // What a thread takes at a time: enough for the memory to stream, and little enough for the
    // threads to end together.
    const long chunk = (192 << 10) / (2 * k) / 16 * 16 + 16;
    const long stride = row_width(l);
    long chunks[4] = {0};
    for (long part = 0; part < parts; part++)
        chunks[part + 1] = chunks[part] + (l->outputs[part] + chunk - 1) / chunk;
    // So many rows stay in the second level cache while the weights pass by.
    long block = (384 << 10) / (2 * k) / 4 * 4;
    if (block < 16) block = 16;
#pragma omp for schedule(dynamic)
    for (long item = 0; item < chunks[parts]; item++) {
        long part = 0, offset = 0;
        while (item >= chunks[part + 1]) offset += l->outputs[part++];
        const long start = (item - chunks[part]) * chunk;
        const long stop = start + chunk < l->outputs[part] ? start + chunk : l->outputs[part];
        const Target to = {(char *)out + offset * width, added ? added + offset : NULL, stride};
        if (rows == 1) {
            multiply_rows(1, 16, l, part, x, to, start, stop, 1, NULL, 0);
        } else if (rows == 2) {
            multiply_rows(2, 8, l, part, x, to, start, stop, 1, NULL, 0);
        } else {
            for (long from = 0; from < rows; from += block) {
                const long end = from + block < rows ? from + block : rows;
                // While four columns are multiplied with all rows, the next four come closer,
                // evenly: all at once they would wait for one another.
                const long tiles = (end - from + 3) / 4, lines = (4 + tiles - 1) / tiles;
                const long share = k / 32 * 32 * lines;
                for (long column = start; column < stop; column += 4) {
                    const long until = column + 4 < stop ? column + 4 : stop;
                    const bf16 *next = l->weight[part] + (column + 4) * k;
                    for (long row = from, done = 0; row < end; row += 4, done += share) {
                        const int more = done < 4 * k;
                        multiply_four(l, part, x + row * k, at_row(to, row, width), end - row,
                                      column, until, more ? next + done : NULL, more ? lines : 0);
                    }
                }
            }
        }
    }
}

// x: [rows, inputs]. out: [rows, sum of outputs], or [rows, outputs] of the gated kinds. added:
// NULL, or as out in bfloat16; it may be out.
void linear(const Linear *l, const bf16 *x, long rows, const bf16 *added, void *out) {
#pragma omp parallel if (rows * l->inputs * row_width(l) > PARALLEL_WORK)
    linear_by_team(l, x, rows, added, out);
}

// act(gate) * up of two arrays, written over the first.
void gate(bf16 *gates, const bf16 *ups, long count, long kind) {
#pragma omp parallel for if (count > PARALLEL_WORK)
    for (long i = 0; i < count; i += 16) {
        __mmask16 mask = first(count - i);
        __m512 activated = rounded(activate(load_wide_some(gates + i, mask), kind));
        __m512 product = _mm512_mul_ps(activated, load_wide_some(ups + i, mask));
        _mm256_mask_storeu_epi16(gates + i, mask, narrow(product));
    }
}

// --- norms and rotary positions ----------------------------------------------------------------

// RMSNorm of one row; x and out may be one. With `shifted` the factor is 1 + weight, in float32
// (Gemma).
INLINE void norm_row(const bf16 *x, const bf16 *weight, bf16 *out, long width, float epsilon,
                     long shifted) {
    __m512 squares = _mm512_setzero_ps();
    for (long i = 0; i < width; i += 16) {
        __m512 v = load_wide_some(x + i, first(width - i));
        squares = _mm512_fmadd_ps(v, v, squares);
    }
    const float mean = _mm512_reduce_add_ps(squares) / width;
    const __m512 factor = _mm512_set1_ps(1.0f / sqrtf(mean + epsilon));
    for (long i = 0; i < width; i += 16) {
        __mmask16 mask = first(width - i);
        __m512 v = _mm512_mul_ps(load_wide_some(x + i, mask), factor);
        __m512 w = load_wide_some(weight + i, mask);
        if (shifted)
            v = _mm512_mul_ps(v, _mm512_add_ps(w, _mm512_set1_ps(1.0f)));
        else
            v = _mm512_mul_ps(rounded(v), w);
        _mm256_mask_storeu_epi16(out + i, mask, narrow(v));
    }
}

// norm_row for [rows, width], all with the same weights.
void rms_norm(const bf16 *x, const bf16 *weight, bf16 *out, long rows, long width, float epsilon,
              long shifted) {
#pragma omp parallel for if (rows * width > PARALLEL_WORK)
    for (long row = 0; row < rows; row++)
        norm_row(x + row * width, weight, out + row * width, width, epsilon, shifted);
}

// Rotates heads that lie side by side, in place: x * cos + rotate_half(x) * sin.
// x: [heads, width]. cos, sin: [width]. width is a multiple of 32.
INLINE void rotate_row(bf16 *x, const bf16 *cos, const bf16 *sin, long heads, long width) {
    const long half = width / 2;
    for (long head = 0; head < heads; head++) {
        bf16 *p = x + head * width;
        for (long i = 0; i < half; i += 16) {
            __m512 low = load_wide(p + i), high = load_wide(p + half + i);
            __m512 a = rounded(_mm512_mul_ps(low, load_wide(cos + i)));
            __m512 b = rounded(_mm512_mul_ps(high, load_wide(sin + i)));
            __m512 d = rounded(_mm512_mul_ps(high, load_wide(cos + half + i)));
            __m512 e = rounded(_mm512_mul_ps(low, load_wide(sin + half + i)));
            _mm256_storeu_si256((__m256i *)(p + i), narrow(_mm512_sub_ps(a, b)));
            _mm256_storeu_si256((__m256i *)(p + half + i), narrow(_mm512_add_ps(d, e)));
        }
    }
}

// rotate_row for the first `heads` heads of rows `stride` apart. cos, sin: [rows, width].
void rotate(bf16 *x, long stride, const bf16 *cos, const bf16 *sin, long rows, long heads,
            long width) {
#pragma omp parallel for if (rows * heads * width > PARALLEL_WORK)
    for (long row = 0; row < rows; row++)
        rotate_row(x + row * stride, cos + row * width, sin + row * width, heads, width);
}

// --- attention ---------------------------------------------------------------------------------

// One layer's paged keys and values, and how to look at them.
typedef struct {
    bf16 *keys;    // [blocks, block_size, kv_heads, key_width]
    bf16 *values;  // [blocks, block_size, kv_heads, value_width]
    long block_size, kv_heads, group;  // group: query heads of a KV head
    long key_width, value_width;       // multiples of 16
    long window;                       // positions that a query sees, its own included; 0: all
    float scale, softcap;              // softcap 0: none
    const bf16 *sinks;                 // [kv_heads * group], or NULL
} Attention;

// Writes the key and the value of one token, all heads, to its slot.
INLINE void store_row(const Attention *a, const bf16 *key, const bf16 *value, int64_t slot) {
    const long key_row = a->kv_heads * a->key_width, value_row = a->kv_heads * a->value_width;
    memcpy(a->keys + slot * key_row, key, key_row * sizeof(bf16));
    memcpy(a->values + slot * value_row, value, value_row * sizeof(bf16));
}

// store_row for tokens whose keys and values are their strides apart.
void store(const Attention *a, const bf16 *keys, long key_stride, const bf16 *values,
           long value_stride, const int64_t *slots, long tokens) {
    for (long t = 0; t < tokens; t++)
        store_row(a, keys + t * key_stride, values + t * value_stride, slots[t]);
}

enum { CHUNK = 64 };  // positions whose scores are held together

INLINE const bf16 *row_at(const bf16 *rows, long width, const Attention *a, const int64_t *table,
                          long position, long kv_head) {
    const long slot = table[position / a->block_size] * a->block_size + position % a->block_size;
    return rows + (slot * a->kv_heads + kv_head) * width;
}

// Scores of 16 positions from `start` on for each head of the group: scores[head][start - chunk].
// Their values are laid out in pairs of neighbours, so that one instruction multiplies both.
static void score(const Attention *a, const bf16 *queries, const int64_t *table, long start,
                  long context, long kv_head, float *scores, bf16 *pairs) {
    const bf16 *keys[16], *values[16];
    for (long j = 0; j < 16; j++) {
        const long position = start + j < context ? start + j : context - 1;  // any that exists
        keys[j] = row_at(a->keys, a->key_width, a, table, position, kv_head);
        values[j] = row_at(a->values, a->value_width, a, table, position, kv_head);
    }
    // The next positions lie anywhere, so no hardware sees them coming.
    for (long j = start + 16; j < start + 32 && j < context; j++) {
        const bf16 *key = row_at(a->keys, a->key_width, a, table, j, kv_head);
        const bf16 *value = row_at(a->values, a->value_width, a, table, j, kv_head);
        for (long i = 0; i < a->key_width; i += 32)
            _mm_prefetch((const char *)(key + i), _MM_HINT_T0);
        for (long i = 0; i < a->value_width; i += 32)
            _mm_prefetch((const char *)(value + i), _MM_HINT_T0);
    }
    for (long i = 0; i < a->value_width; i += 32) {
        const __mmask32 mask = first_32(a->value_width - i);
        UNROLL for (int j = 0; j < 16; j += 2) {
            __m512i x = _mm512_maskz_loadu_epi16(mask, values[j] + i);
            __m512i y = _mm512_maskz_loadu_epi16(mask, values[j + 1] + i);
            bf16 *to = pairs + i * CHUNK + j * 32;
            _mm512_storeu_si512(to, _mm512_unpacklo_epi16(x, y));
            _mm512_storeu_si512(to + 32, _mm512_unpackhi_epi16(x, y));
        }
    }
    for (long g = 0; g < a->group; g++) {
        __m512 dots[16];
        UNROLL for (int j = 0; j < 16; j++) dots[j] = _mm512_setzero_ps();
        const bf16 *query = queries + g * a->key_width;
        long i = 0;
        for (; i + 32 <= a->key_width; i += 32)
            UNROLL for (int j = 0; j < 16; j++)
                dots[j] = _mm512_dpbf16_ps(dots[j], load_pairs(query + i, 0xffffffffu),
                                           load_pairs(keys[j] + i, 0xffffffffu));
        if (i < a->key_width)
            UNROLL for (int j = 0; j < 16; j++)
                dots[j] = _mm512_dpbf16_ps(dots[j], load_pairs(query + i, 0xffffu),
                                           load_pairs(keys[j] + i, 0xffffu));
        __m512 found = _mm512_mul_ps(sum_lanes(dots), _mm512_set1_ps(a->scale));
        if (a->softcap > 0) {
            __m512 cap = _mm512_set1_ps(a->softcap);
            found = _mm512_mul_ps(hyperbolic_tangent(_mm512_div_ps(found, cap)), cap);
        }
        _mm512_storeu_ps(scores + g * CHUNK, found);
    }
}

// The attention of one query token's heads that share a KV head, in one pass over the context with
// a running maximum. Positions are taken CHUNK at a time from a multiple of that on, so the order
// of the sums depends on the sequence alone. The weights of values are rounded to bfloat16, as
// Transformers' code does.
static void attend(const Attention *a, const bf16 *queries, bf16 *out, const int64_t *table,
                   long context, long kv_head, float *memory) {
    const long group = a->group, value_width = a->value_width;
    const long parts = (value_width + 31) / 32;  // of 32 numbers, each two vectors of sums
    const long low = a->window && context > a->window ? context - a->window : 0;
    float *maxima = memory, *totals = maxima + group, *scores = totals + group;
    float *sums = scores + group * CHUNK;
    bf16 *pairs = (bf16 *)(sums + group * parts * 32);
    for (long g = 0; g < group; g++) {
        maxima[g] = a->sinks ? wide(a->sinks[kv_head * group + g]) : -INFINITY;
        totals[g] = a->sinks ? 1.0f : 0.0f;
    }
    memset(sums, 0, group * parts * 32 * sizeof(float));
    for (long chunk = low / CHUNK * CHUNK; chunk < context; chunk += CHUNK) {
        const long end = chunk + CHUNK < context ? chunk + CHUNK : context;
        const long used = (end - chunk + 15) / 16 * 16;
        for (long start = chunk; start < end; start += 16)
            score(a, queries, table, start, context, kv_head, scores + start - chunk,
                  pairs + (start - chunk) * 32);
        for (long g = 0; g < group; g++) {
            float *of_head = scores + g * CHUNK, *target = sums + g * parts * 32;
            __m512 most = _mm512_set1_ps(maxima[g]);
            for (long i = 0; i < used; i += 16) {
                const __mmask16 seen = first(end - chunk - i) & ~first(low - chunk - i);
                most = _mm512_mask_max_ps(most, seen, most, _mm512_loadu_ps(of_head + i));
            }
            const float largest = _mm512_reduce_max_ps(most);
            if (largest > maxima[g]) {
                const __m512 shrink = _mm512_set1_ps(expf(maxima[g] - largest));
                totals[g] *= _mm512_cvtss_f32(shrink);
                for (long i = 0; i < parts * 32; i += 16) {
                    __m512 sum = _mm512_mul_ps(_mm512_loadu_ps(target + i), shrink);
                    _mm512_storeu_ps(target + i, sum);
                }
                maxima[g] = largest;
            }
            most = _mm512_set1_ps(largest);
            __m512 total = _mm512_setzero_ps();
            for (long i = 0; i < used; i += 16) {
                const __mmask16 seen = first(end - chunk - i) & ~first(low - chunk - i);
                __m512 weights = exponential(_mm512_sub_ps(_mm512_loadu_ps(of_head + i), most));
                const __m256i narrowed = narrow(_mm512_maskz_mov_ps(seen, weights));
                total = _mm512_add_ps(total, widen(narrowed));
                // Over the scores, of which those before have been read.
                _mm256_storeu_si256((__m256i *)((bf16 *)of_head + i), narrowed);
            }
            totals[g] += _mm512_reduce_add_ps(total);
        }
        for (long g = 0; g < group; g++) {
            const bf16 *weights = (bf16 *)(scores + g * CHUNK);
            float *target = sums + g * parts * 32;
            for (long i = 0; i < parts; i++) {
                const bf16 *from = pairs + i * CHUNK * 32;
                __m512 x = _mm512_loadu_ps(target + i * 32);
                __m512 y = _mm512_loadu_ps(target + i * 32 + 16);
                for (long j = 0; j < used; j += 2) {
                    int two;
                    memcpy(&two, weights + j, sizeof two);
                    __m512bh weight = (__m512bh)_mm512_set1_epi32(two);
                    x = _mm512_dpbf16_ps(x, weight, load_pairs(from + j * 32, 0xffffffffu));
                    y = _mm512_dpbf16_ps(y, weight, load_pairs(from + j * 32 + 32, 0xffffffffu));
                }
                _mm512_storeu_ps(target + i * 32, x);
                _mm512_storeu_ps(target + i * 32 + 16, y);
            }
        }
    }
    // Undoes the order that unpacking has left: four of the first vector, four of the second.
    const __m512i to_low =
        _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i to_high = _mm512_add_epi32(to_low, _mm512_set1_epi32(8));
    for (long g = 0; g < group; g++)
        for (long i = 0; i < parts; i++) {
            const float *from = sums + (g * parts + i) * 32;
            const __m512 total = _mm512_set1_ps(totals[g]);
            __m512 x = _mm512_div_ps(_mm512_loadu_ps(from), total);
            __m512 y = _mm512_div_ps(_mm512_loadu_ps(from + 16), total);
            bf16 *to = out + g * value_width + i * 32;
            const long left = value_width - i * 32;
            __m512 low_half = _mm512_permutex2var_ps(x, to_low, y);
            __m512 high_half = _mm512_permutex2var_ps(x, to_high, y);
            _mm256_mask_storeu_epi16(to, first(left), narrow(low_half));
            _mm256_mask_storeu_epi16(to + 16, first(left - 16), narrow(high_half));
        }
}

static void decode_attention_by_team(const Attention *a, const bf16 *queries, long stride,
                                     bf16 *out, long rows, const int64_t *tables, long blocks,
                                     const int64_t *contexts) {
    const long heads = a->kv_heads * a->group, padded = (a->value_width + 31) / 32 * 32;
    float memory[a->group * (2 + CHUNK + padded) + CHUNK / 2 * padded];
#pragma omp for schedule(dynamic)
    for (long item = 0; item < rows * a->kv_heads; item++) {
        const long row = item / a->kv_heads, head = item % a->kv_heads;
        attend(a, queries + row * stride + head * a->group * a->key_width,
               out + (row * heads + head * a->group) * a->value_width, tables + row * blocks,
               contexts[row], head, memory);
    }
}

// Attention of rows with one query token each, longest context first. queries: rows `stride` apart,
// [heads, key_width] each. out: [rows, heads, value_width]. tables: [rows, blocks]. contexts:
// [rows], at least 1.
void decode_attention(const Attention *a, const bf16 *queries, long stride, bf16 *out, long rows,
                      const int64_t *tables, long blocks, const int64_t *contexts) {
    const long work = rows * contexts[0] * a->kv_heads * a->group * a->key_width;
#pragma omp parallel if (work > PARALLEL_WORK)
    decode_attention_by_team(a, queries, stride, out, rows, tables, blocks, contexts);
}

// --- decoder layers ----------------------------------------------------------------------------

typedef struct {
    const bf16 *weight;
    float epsilon;
    long shifted;
} Norm;

// x += output(attention(projection(norm(x)))), then x += down(gated(norm(x))).
typedef struct {
    Norm first, second;
    Norm queries, keys;  // of single heads, before rotation; weight NULL: none
    const Linear *projection, *output, *gated, *down;
    const Attention *attention;
} DecoderLayer;

// Rows of one token each. cos, sin: [rows, key_width]. slots: [rows], where keys and values go.
// The others are as in decode_attention.
typedef struct {
    long rows;
    const bf16 *cos, *sin;
    const int64_t *slots, *tables;
    long blocks;
    const int64_t *contexts;
} Step;

static void norm_by_team(const Norm *norm, const bf16 *x, bf16 *out, long rows, long width) {
#pragma omp for
    for (long row = 0; row < rows; row++)
        norm_row(x + row * width, norm->weight, out + row * width, width, norm->epsilon,
                 norm->shifted);
}

// From what `projection` gives to queries, in place, and to keys and values in the cache.
static void place_by_team(const DecoderLayer *l, const Step *step, bf16 *projected, long stride) {
    const Attention *a = l->attention;
    const long width = a->key_width, heads = a->kv_heads * a->group;
#pragma omp for
    for (long row = 0; row < step->rows; row++) {
        bf16 *query = projected + row * stride, *key = query + heads * width;
        for (long head = 0; head < heads && l->queries.weight; head++)
            norm_row(query + head * width, l->queries.weight, query + head * width, width,
                     l->queries.epsilon, l->queries.shifted);
        for (long head = 0; head < a->kv_heads && l->keys.weight; head++)
            norm_row(key + head * width, l->keys.weight, key + head * width, width,
                     l->keys.epsilon, l->keys.shifted);
        rotate_row(query, step->cos + row * width, step->sin + row * width, heads + a->kv_heads,
                   width);
        store_row(a, key, key + a->kv_heads * width, step->slots[row]);
    }
}

// Runs x, [rows, hidden], through layers that follow one another, in place. memory: for each row as
// many numbers as the widest layer's projection and gated put out, and output and down take in, and
// hidden.
void decoder_layers(const DecoderLayer *layers, long count, const Step *step, bf16 *x,
                    bf16 *memory) {
    const long rows = step->rows;
    const Linear *largest = layers->gated;
#pragma omp parallel if (rows * largest->inputs * row_width(largest) > PARALLEL_WORK)
    for (const DecoderLayer *l = layers; l < layers + count; l++) {
        const long hidden = l->projection->inputs, stride = row_width(l->projection);
        bf16 *normed = memory, *projected = normed + rows * hidden;
        bf16 *attended = projected + rows * stride, *gated = attended + rows * l->output->inputs;
        norm_by_team(&l->first, x, normed, rows, hidden);
        linear_by_team(l->projection, normed, rows, NULL, projected);
        place_by_team(l, step, projected, stride);
        decode_attention_by_team(l->attention, projected, stride, attended, rows, step->tables,
                                 step->blocks, step->contexts);
        linear_by_team(l->output, attended, rows, x, x);
        norm_by_team(&l->second, x, normed, rows, hidden);
        linear_by_team(l->gated, normed, rows, NULL, gated);
        linear_by_team(l->down, gated, rows, x, x);
    }
}

// --- softmax -----------------------------------------------------------------------------------

enum { SPAN = 16384 };  // numbers that a thread takes at a time; a multiple of any block

// For each row of [rows, width] its largest number (NaN where there is one), the first place of it,
// and the sums of exp((x - largest) / divisor) over blocks: sums is [rows, blocks].
void softmax_sums(const float *x, long rows, long width, const float *divisors, long block,
                  float *largest, int64_t *places, double *sums) {
    const long spans = (width + SPAN - 1) / SPAN, blocks = (width + block - 1) / block;
    float maxima[spans];
#pragma omp parallel if (rows * width > PARALLEL_WORK)
    for (long row = 0; row < rows; row++) {
        const float *from = x + row * width;
#pragma omp for
        for (long span = 0; span < spans; span++) {
            const long start = span * SPAN, stop = start + SPAN < width ? start + SPAN : width;
            __m512 most = _mm512_set1_ps(-INFINITY);
            __mmask16 broken = 0;
            for (long i = start; i < stop; i += 16) {
                __mmask16 mask = first(stop - i);
                __m512 v = _mm512_mask_loadu_ps(most, mask, from + i);
                broken |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
                most = _mm512_max_ps(most, v);
            }
            maxima[span] = broken ? NAN : _mm512_reduce_max_ps(most);
        }
#pragma omp single
        {
            float most = -INFINITY;
            for (long span = 0; span < spans; span++)
                if (maxima[span] > most || maxima[span] != maxima[span]) most = maxima[span];
            largest[row] = most;
            places[row] = width;
        }
        const __m512 most = _mm512_set1_ps(largest[row]), divisor = _mm512_set1_ps(divisors[row]);
#pragma omp for
        for (long b = 0; b < blocks; b++) {
            const long start = b * block, stop = start + block < width ? start + block : width;
            __m512 sum = _mm512_setzero_ps();
            for (long i = start; i < stop; i += 16) {
                __mmask16 mask = first(stop - i);
                __m512 v = _mm512_maskz_loadu_ps(mask, from + i);
                __mmask16 equal = _mm512_mask_cmp_ps_mask(mask, v, most, _CMP_EQ_OQ);
                if (equal) {
                    const int64_t place = i + __builtin_ctz(equal);
#pragma omp critical
                    if (place < places[row]) places[row] = place;
                }
                v = exponential(_mm512_div_ps(_mm512_sub_ps(v, most), divisor));
                sum = _mm512_mask_add_ps(sum, mask, sum, v);
            }
            sums[row * blocks + b] = _mm512_reduce_add_ps(sum);
        }
    }
}
