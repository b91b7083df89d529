// Kernels for models on x86 processors with AVX-512: compiled once with BFLOAT16, for those with
// AVX512-BF16, and once with FLOAT32. What a `number` is, and how it is read and rounded, is all that
// differs.
//
// Weights stay as the model has them, [out, in] row by row: a product's numbers are dot products of
// rows, 16 of them summed across lanes together, and what the next rows need is prefetched while
// these are multiplied. Each dot product adds up in the same order whatever stands beside it, so a
// row's result does not depend on the batch.
//
// Products of bfloat16 are exact, sums are in float32. Pointers need no alignment. Nothing here
// checks anything: the callers in cpu.py and decoder.py do.
//
// What ends in _by_team is called by all threads of a team with the same arguments, and returns when
// all of it is done. So one team can go through many of them, and be woken once.

#include "vectors.h"

#ifdef BFLOAT16
#include "bfloat16.h"
#else
#include "float32.h"
#endif

// --- linear layers -----------------------------------------------------------------------------

enum { PLAIN, WIDE, GATED_SILU, GATED_TANH_GELU };

// One or more linear layers over the same rows, their outputs side by side. The gated kinds have
// two parts, gate and up, without bias, and one output, act(gate) * up. WIDE writes floats,
// rounded to numbers.
typedef struct {
    const number *weight[3];  // [outputs, inputs]
    const number *bias[3];    // [outputs], or NULL
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

// A step of dot_products: a vector's products of each pair of rows, or fewer by the mask.
INLINE void add_products(int rows, int columns, const number *x, const number *weight, long k,
                         Lanes mask, __m512 *sums) {
    Numbers weights[16];
    UNROLL for (int b = 0; b < columns; b++) weights[b] = load(weight + b * k, mask);
    UNROLL for (int a = 0; a < rows; a++) {
        Numbers values = load(x + a * k, mask);
        UNROLL for (int b = 0; b < columns; b++)
            sums[a * columns + b] = add_product(sums[a * columns + b], values, weights[b]);
    }
}

// What a tile gives, 6 by 4 at most: in lane a * columns + b of both vectors together that of rows a
// and b.
typedef struct {
    __m512 of[2];
} Products;

INLINE Products sum_tile(const __m512 *sums, int count) {
    Products products = {{sum_lanes(sums), _mm512_setzero_ps()}};
    if (count > 16) products.of[1] = sum_lanes(sums + 16);
    return products;
}

// Dot products of `rows` rows of x with `columns` rows of weights. With each step `lines` cache
// lines from `ahead` on are brought lines.
INLINE Products dot_products(int rows, int columns, const number *x, const number *weight, long k,
                             const number *ahead, long lines) {
    __m512 sums[32];
    UNROLL for (int i = 0; i < 32; i++) sums[i] = _mm512_setzero_ps();
    long i = 0;
    if (lines)
        for (; i + WIDTH <= k; i += WIDTH) {
            add_products(rows, columns, x + i, weight + i, k, ALL_LANES, sums);
            for (long line = 0; line < lines; line++, ahead += WIDTH)
                _mm_prefetch((const char *)ahead, _MM_HINT_T1);
        }
    // A loop of its own, since even the question whether there are lines takes its time.
    for (; i + WIDTH <= k; i += WIDTH)
        add_products(rows, columns, x + i, weight + i, k, ALL_LANES, sums);
    if (i < k) add_products(rows, columns, x + i, weight + i, k, lanes(k - i), sums);
    return sum_tile(sums, rows * columns);
}

// Where a part's outputs go: rows `stride` numbers apart. What is in `added` at the same places is
// added to them, unless it is NULL.
typedef struct {
    char *out;
    const number *added;
    long stride;
} Target;

// The same for so few rows that reading the weights takes longer than multiplying: weights are read
// in the order in which they lie.
INLINE Products dot_products_in_order(int rows, int columns, const number *x, const number *weight,
                                      long k) {
    __m512 sums[16];
    UNROLL for (int i = 0; i < 16; i++) sums[i] = _mm512_setzero_ps();
    UNROLL for (int b = 0; b < columns; b++) {
        __m512 of_row[4];
        UNROLL for (int a = 0; a < rows; a++) of_row[a] = _mm512_setzero_ps();
        long i = 0;
        for (; i + WIDTH <= k; i += WIDTH) {
            add_products(rows, 1, x + i, weight + b * k + i, k, ALL_LANES, of_row);
            _mm_prefetch((const char *)(weight + b * k + i) + 2048, _MM_HINT_T1);
        }
        if (i < k) add_products(rows, 1, x + i, weight + b * k + i, k, lanes(k - i), of_row);
        UNROLL for (int a = 0; a < rows; a++) sums[a * columns + b] = of_row[a];
    }
    return sum_tile(sums, rows * columns);
}

// Makes outputs of up to 16 products, of the gated kinds with `ups`, and puts them where they go.
INLINE void put_products(int rows, int columns, const Linear *l, long part, __m512 products,
                         __m512 ups, Target to, long column) {
    if (l->bias[part]) {
        float bias[16] = {0};
        UNROLL for (int i = 0; i < rows * columns; i++)
            bias[i] = wide(l->bias[part][column + i % columns]);
        products = _mm512_add_ps(products, _mm512_loadu_ps(bias));
    }
    if (l->kind >= GATED_SILU)
        products = _mm512_mul_ps(rounded(activate(rounded(products), l->kind)), rounded(ups));
    if (to.added) {
        number added[16] = {0};
        UNROLL for (int a = 0; a < rows; a++)
            memcpy(added + a * columns, to.added + a * to.stride + column, columns * sizeof(number));
        products = _mm512_add_ps(rounded(products), load_wide(added));
    }
    if (l->kind == WIDE) {
        float result[16];
        _mm512_storeu_ps(result, rounded(products));
        UNROLL for (int a = 0; a < rows; a++)
            memcpy((float *)to.out + a * to.stride + column, result + a * columns,
                   columns * sizeof(float));
    } else {
        number result[16];
        store_narrow(result, products);
        UNROLL for (int a = 0; a < rows; a++)
            memcpy((number *)to.out + a * to.stride + column, result + a * columns,
                   columns * sizeof(number));
    }
}

INLINE Target at_row(Target to, long row, long width) {
    to.out += row * to.stride * width;
    if (to.added) to.added += row * to.stride;
    return to;
}

// Bytes of an output.
INLINE long output_width(const Linear *l) {
    return l->kind == WIDE ? sizeof(float) : sizeof(number);
}

// One tile of outputs: `rows` rows, and `columns` weights from `column` on. With `in_order` as in
// dot_products_in_order.
INLINE void multiply_tile(int rows, int columns, const Linear *l, long part, const number *x,
                          Target to, long column, int in_order, const number *ahead, long lines) {
    const long k = l->inputs;
    const number *weight = l->weight[part] + column * k;
    const Products products = in_order ? dot_products_in_order(rows, columns, x, weight, k)
                                       : dot_products(rows, columns, x, weight, k, ahead, lines);
    Products ups = products;
    if (l->kind >= GATED_SILU) {
        const number *other = l->weight[1] + column * k;
        const number *other_ahead = ahead ? other + (ahead - weight) : NULL;
        ups = in_order ? dot_products_in_order(rows, columns, x, other, k)
                       : dot_products(rows, columns, x, other, k, other_ahead, lines);
    }
    const int held = rows * columns > 16 ? 16 / columns : rows;
    put_products(held, columns, l, part, products.of[0], ups.of[0], to, column);
    if (held < rows)
        put_products(rows - held, columns, l, part, products.of[1], ups.of[1],
                     at_row(to, held, output_width(l)), column);
}

// Outputs `start` to `stop` of some rows, in tiles of so many columns and the rest one by one.
INLINE void multiply_rows(int rows, int columns, const Linear *l, long part, const number *x,
                          Target to, long start, long stop, int in_order, const number *ahead,
                          long lines) {
    long column = start;
    for (; column + columns <= stop; column += columns)
        multiply_tile(rows, columns, l, part, x, to, column, in_order, ahead, lines);
    for (; column < stop; column++) multiply_tile(rows, 1, l, part, x, to, column, 0, NULL, 0);
}

// The same, of as many rows as a tile may have: of six, of which each weight is read for more
// products, or of four and fewer.
INLINE void multiply_some(const Linear *l, long part, const number *x, Target to, long rows,
                          long start, long stop, const number *ahead, long lines) {
    switch (rows) {
    case 1: multiply_rows(1, 4, l, part, x, to, start, stop, 0, ahead, lines); break;
    case 2: multiply_rows(2, 4, l, part, x, to, start, stop, 0, ahead, lines); break;
    case 3: multiply_rows(3, 4, l, part, x, to, start, stop, 0, ahead, lines); break;
    case 4: multiply_rows(4, 4, l, part, x, to, start, stop, 0, ahead, lines); break;
    default: multiply_rows(6, 4, l, part, x, to, start, stop, 0, ahead, lines); break;
    }
}

// How many rows the next tile has, where so many are left.
INLINE long tile_rows(long left) { return left == 6 || left >= 12 ? 6 : left < 4 ? left : 4; }

INLINE long longer(long a, long b) { return a > b ? a : b; }

// Numbers in a row of the output.
INLINE long row_width(const Linear *l) {
    const long parts = l->kind >= GATED_SILU ? 1 : l->parts;
    long width = 0;
    for (long part = 0; part < parts; part++) width += l->outputs[part];
    return width;
}

// The same, of any number of rows.
static void multiply_block(const Linear *l, long part, const number *x, Target to, long rows,
                           long start, long stop) {
    const long k = l->inputs, width = output_width(l);
    // While four columns are multiplied with all rows, the next four come lines, evenly: all at
    // once they would wait for one another.
    const long tiles = (rows + 5) / 6, lines = (4 + tiles - 1) / tiles;
    const long share = k / WIDTH * WIDTH * lines;
    for (long column = start; column < stop; column += 4) {
        const long until = column + 4 < stop ? column + 4 : stop;
        const number *next = l->weight[part] + (column + 4) * k;
        for (long row = 0, done = 0, some; row < rows; row += some, done += share) {
            const int more = done < 4 * k;
            some = tile_rows(rows - row);
            multiply_some(l, part, x + row * k, at_row(to, row, width), some, column, until,
                          more ? next + done : NULL, more ? lines : 0);
        }
    }
}

static void linear_by_team(const Linear *l, const number *x, long rows, const number *added,
                           void *out) {
    const long k = l->inputs, parts = l->kind >= GATED_SILU ? 1 : l->parts;
    const long width = output_width(l);
    // What a thread takes at a time: enough for the memory to stream, and little enough for the
    // threads to end together.
    const long chunk = (192 << 10) / (sizeof(number) * k) / 16 * 16 + 16;
    const long stride = row_width(l);
    long chunks[4] = {0};
    for (long part = 0; part < parts; part++)
        chunks[part + 1] = chunks[part] + (l->outputs[part] + chunk - 1) / chunk;
    // So many rows stay in the second level cache while the weights pass by: blocks of about one
    // size, of whole tiles.
    const long most = longer((512 << 10) / (sizeof(number) * k), 66);
    const long blocks = (rows + most - 1) / most;
    const long block = blocks ? ((rows + blocks - 1) / blocks + 5) / 6 * 6 : 0;
#pragma omp for schedule(dynamic)
    for (long item = 0; item < blocks * chunks[parts]; item++) {
        const long from = item / chunks[parts] * block, place = item % chunks[parts];
        long part = 0, offset = 0;
        while (place >= chunks[part + 1]) offset += l->outputs[part++];
        const long start = (place - chunks[part]) * chunk;
        const long stop = start + chunk < l->outputs[part] ? start + chunk : l->outputs[part];
        const Target to = {(char *)out + offset * width, added ? added + offset : NULL, stride};
        if (rows == 1)
            multiply_rows(1, 16, l, part, x, to, start, stop, 1, NULL, 0);
        else if (rows == 2)
            multiply_rows(2, 8, l, part, x, to, start, stop, 1, NULL, 0);
        else
            multiply_block(l, part, x + from * k, at_row(to, from, width),
                           from + block < rows ? block : rows - from, start, stop);
    }
}

// x: [rows, inputs]. out: [rows, sum of outputs], or [rows, outputs] of the gated kinds. added:
// NULL, or as out in numbers; it may be out.
void linear(const Linear *l, const number *x, long rows, const number *added, void *out) {
#pragma omp parallel if (rows * l->inputs * row_width(l) > PARALLEL_WORK)
    linear_by_team(l, x, rows, added, out);
}

// act(gate) * up of two arrays, written over the first.
void gate(number *gates, const number *ups, long count, long kind) {
#pragma omp parallel for if (count > PARALLEL_WORK)
    for (long i = 0; i < count; i += 16) {
        __mmask16 mask = first(count - i);
        __m512 activated = rounded(activate(load_wide_some(gates + i, mask), kind));
        __m512 product = _mm512_mul_ps(activated, load_wide_some(ups + i, mask));
        store_narrow_some(gates + i, mask, product);
    }
}

// --- norms and rotary positions ----------------------------------------------------------------

// RMSNorm of one row; x and out may be one. With `shifted` the factor is 1 + weight, in float32
// (Gemma).
INLINE void norm_row(const number *x, const number *weight, number *out, long width, float epsilon,
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
        store_narrow_some(out + i, mask, v);
    }
}

// norm_row for [rows, width], all with the same weights.
void rms_norm(const number *x, const number *weight, number *out, long rows, long width, float epsilon,
              long shifted) {
#pragma omp parallel for if (rows * width > PARALLEL_WORK)
    for (long row = 0; row < rows; row++)
        norm_row(x + row * width, weight, out + row * width, width, epsilon, shifted);
}

// Rotates heads that lie side by side, in place: x * cos + rotate_half(x) * sin.
// x: [heads, width]. cos, sin: [width]. width is a multiple of 32.
INLINE void rotate_row(number *x, const number *cos, const number *sin, long heads, long width) {
    const long half = width / 2;
    for (long head = 0; head < heads; head++) {
        number *p = x + head * width;
        for (long i = 0; i < half; i += 16) {
            __m512 low = load_wide(p + i), high = load_wide(p + half + i);
            __m512 a = rounded(_mm512_mul_ps(low, load_wide(cos + i)));
            __m512 b = rounded(_mm512_mul_ps(high, load_wide(sin + i)));
            __m512 d = rounded(_mm512_mul_ps(high, load_wide(cos + half + i)));
            __m512 e = rounded(_mm512_mul_ps(low, load_wide(sin + half + i)));
            store_narrow(p + i, _mm512_sub_ps(a, b));
            store_narrow(p + half + i, _mm512_add_ps(d, e));
        }
    }
}

// rotate_row for the first `heads` heads of rows `stride` apart. cos, sin: [rows, width].
void rotate(number *x, long stride, const number *cos, const number *sin, long rows, long heads,
            long width) {
#pragma omp parallel for if (rows * heads * width > PARALLEL_WORK)
    for (long row = 0; row < rows; row++)
        rotate_row(x + row * stride, cos + row * width, sin + row * width, heads, width);
}

// --- attention ---------------------------------------------------------------------------------

// One layer's paged keys and values, and how to look at them.
typedef struct {
    number *keys;    // [blocks, block_size, kv_heads, key_width]
    number *values;  // [blocks, block_size, kv_heads, value_width]
    long block_size, kv_heads, group;  // group: query heads of a KV head
    long key_width, value_width;       // multiples of 16
    long window;                       // positions that a query sees, its own included; 0: all
    float scale, softcap;              // softcap 0: none
    const number *sinks;                 // [kv_heads * group], or NULL
} Attention;

// Writes the key and the value of one token, all heads, to its slot.
INLINE void store_row(const Attention *a, const number *key, const number *value, int64_t slot) {
    const long key_row = a->kv_heads * a->key_width, value_row = a->kv_heads * a->value_width;
    memcpy(a->keys + slot * key_row, key, key_row * sizeof(number));
    memcpy(a->values + slot * value_row, value, value_row * sizeof(number));
}

// store_row for tokens whose keys and values are their strides apart.
void store(const Attention *a, const number *keys, long key_stride, const number *values,
           long value_stride, const int64_t *slots, long tokens) {
    for (long t = 0; t < tokens; t++)
        store_row(a, keys + t * key_stride, values + t * value_stride, slots[t]);
}

enum {
    CHUNK = 64,  // positions whose scores are held together
    ROWS = 128,  // of one KV head, that look at them together, if one token's heads are not more
};

// Query tokens of one sequence, whose rows are their strides apart, and what they may see.
typedef struct {
    const number *queries;
    number *out;
    long stride, out_stride, count;
    const int64_t *table, *contexts;  // contexts: [count], at least 1 each
} Tokens;

INLINE const number *row_at(const number *rows, long width, const Attention *a, const int64_t *table,
                          long position, long kv_head) {
    const long slot = table[position / a->block_size] * a->block_size + position % a->block_size;
    return rows + (slot * a->kv_heads + kv_head) * width;
}

// From which position on a query token sees those before it.
INLINE long first_seen(const Attention *a, long context) {
    return a->window && context > a->window ? context - a->window : 0;
}

// What attend keeps of its rows, which are the heads that share a KV head, of each token in turn.
typedef struct {
    long rows, padded;       // padded: value_width made a multiple of 32
    long *first, *end;       // [rows], the positions that each sees
    float *maxima, *totals;  // [rows], of the scores so far, and of their weights
    float *scores;           // [rows, CHUNK], then weights, as numbers, at the beginning of each row
    float *sums;             // [rows, padded], of the values by their weights
    number *queries;         // [rows, key_width]
    number *keys;            // [16, key_width]
    number *values;          // [padded / 32] times CHUNK positions of 32, as lay_out_values puts them
} Rows;

// How many of a row's positions from `chunk` on matter: none, or up to the last that it sees, in
// whole vectors.
INLINE long used_by(const Rows *r, long row, long chunk) {
    const long left = r->end[row] - chunk;
    if (chunk + CHUNK <= r->first[row] || left <= 0) return 0;
    return left < CHUNK ? (left + 15) / 16 * 16 : CHUNK;
}

// Brings the keys and values of 16 positions from `start` on next to one another. There are keys and
// values of `context` positions.
static void gather_positions(const Attention *a, const int64_t *table, long start, long context,
                             long kv_head, number *keys, number *laid_out) {
    const number *values[16];
    for (long j = 0; j < 16; j++) {
        const long position = start + j < context ? start + j : context - 1;  // any that exists
        const number *key = row_at(a->keys, a->key_width, a, table, position, kv_head);
        memcpy(keys + j * a->key_width, key, a->key_width * sizeof(number));
        values[j] = row_at(a->values, a->value_width, a, table, position, kv_head);
    }
    for (long i = 0; i < a->value_width; i += 32)
        lay_out_values(values, i, a->value_width - i, laid_out + i * CHUNK);
    // The next positions lie anywhere, so no hardware sees them coming. Of rows a multiple of 4 KiB
    // apart the first level would keep eight.
    for (long j = start + CHUNK; j < start + CHUNK + 16 && j < context; j++) {
        const number *key = row_at(a->keys, a->key_width, a, table, j, kv_head);
        const number *value = row_at(a->values, a->value_width, a, table, j, kv_head);
        for (long i = 0; i < a->key_width; i += WIDTH)
            _mm_prefetch((const char *)(key + i), _MM_HINT_T1);
        for (long i = 0; i < a->value_width; i += WIDTH)
            _mm_prefetch((const char *)(value + i), _MM_HINT_T1);
    }
}

// Scores of some rows and 16 positions, `columns` at a time.
INLINE void score_rows(int rows, int columns, const Attention *a, const number *queries,
                       const number *keys, float *scores) {
    const long width = a->key_width;
    for (long column = 0; column < 16; column += columns) {
        const number *some = keys + column * width;
        __m512 found = dot_products(rows, columns, queries, some, width, NULL, 0).of[0];
        found = _mm512_mul_ps(found, _mm512_set1_ps(a->scale));
        if (a->softcap > 0) {
            const __m512 cap = _mm512_set1_ps(a->softcap);
            found = _mm512_mul_ps(hyperbolic_tangent(_mm512_div_ps(found, cap)), cap);
        }
        float result[16];
        _mm512_storeu_ps(result, found);
        UNROLL for (int i = 0; i < rows; i++)
            memcpy(scores + i * CHUNK + column, result + i * columns, columns * sizeof(float));
    }
}

// Scores of all rows and 16 positions of a chunk, from `offset` on; of four rows at a time, unless
// they are of no use to any of these.
static void score(const Attention *a, const Rows *r, long chunk, long offset) {
    for (long row = 0; row < r->rows; row += 4) {
        const long some = r->rows - row < 4 ? r->rows - row : 4;
        const number *queries = r->queries + row * a->key_width;
        float *scores = r->scores + row * CHUNK + offset;
        long used = 0;
        for (long i = 0; i < some; i++) used = longer(used, used_by(r, row + i, chunk));
        if (used <= offset) continue;
        switch (some) {
        case 1: score_rows(1, 16, a, queries, r->keys, scores); break;
        case 2: score_rows(2, 8, a, queries, r->keys, scores); break;
        case 3: score_rows(3, 4, a, queries, r->keys, scores); break;
        default: score_rows(4, 4, a, queries, r->keys, scores); break;
        }
    }
}

// Makes a row's scores of a chunk to weights. They are relative to the largest score so far: if that
// has grown, what there is of sums shrinks.
INLINE void weigh(const Rows *r, long row, long chunk) {
    float *scores = r->scores + row * CHUNK, *sums = r->sums + row * r->padded;
    __mmask16 seen[CHUNK / 16];
    __m512 most = _mm512_set1_ps(r->maxima[row]), total = _mm512_setzero_ps();
    UNROLL for (int i = 0; i < CHUNK / 16; i++) {
        const long start = chunk + i * 16;
        seen[i] = first(r->end[row] - start) & ~first(r->first[row] - start);
        most = _mm512_mask_max_ps(most, seen[i], most, _mm512_loadu_ps(scores + i * 16));
    }
    const float largest = _mm512_reduce_max_ps(most), before = r->maxima[row];
    if (largest > before && before > -INFINITY) {
        const __m512 shrink = _mm512_set1_ps(expf(before - largest));
        r->totals[row] *= _mm512_cvtss_f32(shrink);
        for (long i = 0; i < r->padded; i += 16)
            _mm512_storeu_ps(sums + i, _mm512_mul_ps(_mm512_loadu_ps(sums + i), shrink));
    }
    r->maxima[row] = largest;
    most = _mm512_set1_ps(largest);
    UNROLL for (int i = 0; i < CHUNK / 16; i++) {
        __m512 weights = exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + i * 16), most));
        weights = _mm512_maskz_mov_ps(seen[i], weights);
        total = _mm512_add_ps(total, rounded(weights));
        store_narrow((number *)scores + i * 16, weights);  // over scores that have been read
    }
    r->totals[row] += _mm512_reduce_add_ps(total);
}

// Adds a chunk's values to the sums of all rows, 32 numbers of them at a time: these stay close. Of
// four rows at once, if as many positions matter to them.
static void add_chunk(const Rows *r, long chunk) {
    const long stride = CHUNK * sizeof(float) / sizeof(number);
    for (long part = 0; part < r->padded; part += 32) {
        const number *values = r->values + part * CHUNK;
        for (long row = 0, some; row < r->rows; row += some) {
            float *sums = r->sums + row * r->padded + part;
            const number *weights = (const number *)(r->scores + row * CHUNK);
            const long used = used_by(r, row, chunk);
            some = 1;
            while (some < 4 && row + some < r->rows && used_by(r, row + some, chunk) == used) some++;
            switch (some) {
            case 1: add_values(1, sums, r->padded, weights, stride, values, used); break;
            case 2: add_values(2, sums, r->padded, weights, stride, values, used); break;
            case 3: add_values(3, sums, r->padded, weights, stride, values, used); break;
            default: add_values(4, sums, r->padded, weights, stride, values, used); break;
            }
        }
    }
}

// Writes what the rows have come to.
static void put_rows(const Attention *a, const Rows *r, const Tokens *tokens, long kv_head) {
    const long group = a->group, width = a->value_width;
    for (long row = 0; row < r->rows; row++) {
        const __m512 total = _mm512_set1_ps(r->totals[row]);
        number *to = tokens->out + row / group * tokens->out_stride
                     + (kv_head * group + row % group) * width;
        for (long i = 0; i < width; i += 32) {
            const float *from = r->sums + row * r->padded + i;
            __m512 x = _mm512_div_ps(_mm512_loadu_ps(from), total);
            __m512 y = _mm512_div_ps(_mm512_loadu_ps(from + 16), total);
            put_in_order(&x, &y);
            store_narrow_some(to + i, first(width - i), x);
            store_narrow_some(to + i + 16, first(width - i - 16), y);
        }
    }
}

// The attention of the heads that share a KV head, of some query tokens, in one pass over their
// context with a running maximum. Positions are taken CHUNK at a time from a multiple of that on, so
// the order of a token's sums depends on its sequence alone, and not on who looks beside it. The
// weights of values are rounded, as Transformers' code does.
static void attend(const Attention *a, const Tokens *tokens, long kv_head, const Rows *room) {
    const long group = a->group;
    Rows rows = *room, *r = &rows;
    r->rows = tokens->count * group;
    long context = 0, lowest = LONG_MAX;
    for (long row = 0; row < r->rows; row++) {
        const long token = row / group, head = kv_head * group + row % group;
        const number *query = tokens->queries + token * tokens->stride + head * a->key_width;
        memcpy(r->queries + row * a->key_width, query, a->key_width * sizeof(number));
        r->end[row] = tokens->contexts[token];
        r->first[row] = first_seen(a, r->end[row]);
        r->maxima[row] = a->sinks ? wide(a->sinks[head]) : -INFINITY;
        r->totals[row] = a->sinks ? 1.0f : 0.0f;
        context = longer(context, r->end[row]);
        lowest = r->first[row] < lowest ? r->first[row] : lowest;
    }
    memset(r->sums, 0, r->rows * r->padded * sizeof(float));
    for (long chunk = lowest / CHUNK * CHUNK; chunk < context; chunk += CHUNK) {
        for (long offset = 0; offset < CHUNK && chunk + offset < context; offset += 16) {
            gather_positions(a, tokens->table, chunk + offset, context, kv_head, r->keys,
                             r->values + offset * 32);
            score(a, r, chunk, offset);
        }
        for (long row = 0; row < r->rows; row++)
            if (used_by(r, row, chunk)) weigh(r, row, chunk);
        add_chunk(r, chunk);
    }
    put_rows(a, r, tokens, kv_head);
}

// Tokens whose rows attend takes at most.
INLINE long most_tokens(const Attention *a) { return longer(ROWS / a->group, 1); }

// How many rows from one on are tokens of one sequence, close together: they have its blocks in
// common. It does not matter for any row's bits.
static long together(const Attention *a, long row, long rows, const int64_t *tables, long blocks,
                     const int64_t *contexts) {
    const int64_t *table = tables + row * blocks;
    const long most = most_tokens(a);
    long count = 1;
    while (count < most && row + count < rows) {
        const long here = contexts[row], there = contexts[row + count];
        const long longer = here > there ? here : there;
        const long shared = (longer + a->block_size - 1) / a->block_size;
        if (labs(here - there) > CHUNK) break;
        if (memcmp(table, table + count * blocks, shared * sizeof(int64_t))) break;
        count++;
    }
    return count;
}

static void decode_attention_by_team(const Attention *a, const number *queries, long stride,
                                     number *out, long rows, const int64_t *tables, long blocks,
                                     const int64_t *contexts) {
    const long width = a->kv_heads * a->group * a->value_width;
    const long most = most_tokens(a) * a->group, padded = (a->value_width + 31) / 32 * 32;
    long limits[2 * most];
    float floats[most * (2 + CHUNK + padded)];
    number numbers[(most + 16) * a->key_width + CHUNK * padded];
    const Rows room = {
        .padded = padded,
        .first = limits,
        .end = limits + most,
        .maxima = floats,
        .totals = floats + most,
        .scores = floats + 2 * most,
        .sums = floats + (2 + CHUNK) * most,
        .queries = numbers,
        .keys = numbers + most * a->key_width,
        .values = numbers + (most + 16) * a->key_width,
    };
    long *starts = malloc((rows + 1) * sizeof(long)), tiles = 0;
    for (long row = 0; row < rows; row += together(a, row, rows, tables, blocks, contexts))
        starts[tiles++] = row;
    starts[tiles] = rows;
#pragma omp for schedule(dynamic)
    for (long item = 0; item < tiles * a->kv_heads; item++) {
        const long row = starts[item / a->kv_heads], end = starts[item / a->kv_heads + 1];
        const Tokens tokens = {
            queries + row * stride, out + row * width, stride, width, end - row,
            tables + row * blocks, contexts + row,
        };
        attend(a, &tokens, item % a->kv_heads, &room);
    }
    free(starts);
}

// Attention of rows with one query token each, best with the longest contexts first. queries: rows
// `stride` apart, [heads, key_width] each. out: [rows, heads, value_width]. tables: [rows, blocks].
// contexts: [rows], at least 1.
void decode_attention(const Attention *a, const number *queries, long stride, number *out, long rows,
                      const int64_t *tables, long blocks, const int64_t *contexts) {
    const long work = rows * contexts[0] * a->kv_heads * a->group * a->key_width;
#pragma omp parallel if (work > PARALLEL_WORK)
    decode_attention_by_team(a, queries, stride, out, rows, tables, blocks, contexts);
}

// --- decoder layers ----------------------------------------------------------------------------

typedef struct {
    const number *weight;
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
// tables, blocks and contexts are as in decode_attention. read: [num_read], rising: those whose result
// is wanted, at most half of the rows, with their tables and contexts; num_read is rows if all are.
typedef struct {
    long rows;
    const number *cos, *sin;
    const int64_t *slots, *tables;
    long blocks;
    const int64_t *contexts;
    long num_read;
    const int64_t *read, *read_tables, *read_contexts;
} Step;

static void norm_by_team(const Norm *norm, const number *x, number *out, long rows, long width) {
#pragma omp for
    for (long row = 0; row < rows; row++)
        norm_row(x + row * width, norm->weight, out + row * width, width, norm->epsilon,
                 norm->shifted);
}

// From what `projection` gives to queries, in place, and to keys and values in the cache.
static void place_by_team(const DecoderLayer *l, const Step *step, number *projected, long stride) {
    const Attention *a = l->attention;
    const long width = a->key_width, heads = a->kv_heads * a->group;
#pragma omp for
    for (long row = 0; row < step->rows; row++) {
        number *query = projected + row * stride, *key = query + heads * width;
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

// Brings the rows that are read to the front, of what the projection gave in place, of x to `kept`.
static void keep_by_team(const Step *step, number *projected, long stride, const number *x,
                         number *kept, long hidden) {
#pragma omp single
    for (long i = 0; i < step->num_read; i++) {
        const long row = step->read[i];
        memmove(projected + i * stride, projected + row * stride, stride * sizeof(number));
        memcpy(kept + i * hidden, x + row * hidden, hidden * sizeof(number));
    }
}

// Runs x, [rows, hidden], through layers that follow one another, in place. Rows that are not read
// leave the last one when their keys and values are stored. memory: for each row as many numbers as
// the widest layer's projection and gated put out, and output and down take in, and hidden.
void decoder_layers(const DecoderLayer *layers, long count, const Step *step, number *x,
                    number *memory) {
    const long rows = step->rows;
    const Linear *largest = layers->gated;
#pragma omp parallel if (rows * largest->inputs * row_width(largest) > PARALLEL_WORK)
    for (const DecoderLayer *l = layers; l < layers + count; l++) {
        const long hidden = l->projection->inputs, stride = row_width(l->projection);
        number *normed = memory, *projected = normed + rows * hidden;
        number *attended = projected + rows * stride, *gated = attended + rows * l->output->inputs;
        norm_by_team(&l->first, x, normed, rows, hidden);
        linear_by_team(l->projection, normed, rows, NULL, projected);
        place_by_team(l, step, projected, stride);
        const int some = step->num_read < rows && l == layers + count - 1;
        const long left = some ? step->num_read : rows;
        number *kept = x;
        if (some) {
            kept = normed, normed += left * hidden;
            keep_by_team(step, projected, stride, x, kept, hidden);
        }
        decode_attention_by_team(l->attention, projected, stride, attended, left,
                                 some ? step->read_tables : step->tables, step->blocks,
                                 some ? step->read_contexts : step->contexts);
        linear_by_team(l->output, attended, left, kept, kept);
        norm_by_team(&l->second, kept, normed, left, hidden);
        linear_by_team(l->gated, normed, left, NULL, gated);
        linear_by_team(l->down, gated, left, kept, kept);
        if (some)
#pragma omp for
            for (long i = 0; i < left; i++)
                memcpy(x + step->read[i] * hidden, kept + i * hidden, hidden * sizeof(number));
    }
}
