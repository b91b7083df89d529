// Kernels for models on x86 processors with AVX-512: compiled with FLOAT32, with BFLOAT16 for those
// with AVX512-BF16, and with TILES for bfloat16 on those with AMX too. What a `number` is, and how
// it is read and rounded, is in bfloat16.h and float32.h; how products are summed, in linear_*.h
// and attention_*.h.
//
// Weights stay as the model has them, [out, in] row by row, and what the next rows need is
// prefetched while these are multiplied. Each dot product adds up in the same order whatever stands
// beside it, so a row's result does not depend on the batch.
//
// Products of bfloat16 are exact, sums are in float32. Pointers need no alignment. Nothing here
// checks anything: the callers in cpu.py and decoder.py do.
//
// What ends in _by_team is called by all threads of a team with the same arguments, and returns
// when all of it is done. So one team can go through many of them, and be woken once.

#include "vectors.h"

#ifdef FLOAT32
#include "float32.h"
#else
#include "bfloat16.h"
#endif
#ifdef TILES
#include "tiles.h"
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

// Where a part's outputs go: rows `stride` numbers apart. What is in `added` at the same places is
// added to them, unless it is NULL.
typedef struct {
    char *out;
    const number *added;
    long stride;
} Target;

INLINE Target at_row(Target to, long row, long width) {
    to.out += row * to.stride * width;
    if (to.added) to.added += row * to.stride;
    return to;
}

// Bytes of an output.
INLINE long output_width(const Linear *l) {
    return l->kind == WIDE ? sizeof(float) : sizeof(number);
}

enum { CHUNK_BYTES = 320 << 10 };  // of weights, about

INLINE long longer(long a, long b) { return a > b ? a : b; }

// Parts that have outputs of their own.
INLINE long output_parts(const Linear *l) { return l->kind >= GATED_SILU ? 1 : l->parts; }

// Numbers in a row of the output.
INLINE long row_width(const Linear *l) {
    long width = 0;
    for (long part = 0; part < output_parts(l); part++) width += l->outputs[part];
    return width;
}

// Of a part whose outputs begin at `offset` in a row.
INLINE Target target_of(const Linear *l, void *out, const number *added, long offset) {
    char *here = (char *)out + offset * output_width(l);
    return (Target){here, added ? added + offset : NULL, row_width(l)};
}

// What the threads of a team take at a time of all outputs, side by side: enough for the memory to
// stream, little enough to end together, and about as many for each thread.
typedef struct {
    long size, count;
} Chunks;

INLINE Chunks chunks_of(const Linear *l, long tile) {
    const long outputs = row_width(l), threads = omp_get_num_threads();
    const long bytes = sizeof(number) * l->inputs * (l->kind >= GATED_SILU ? 2 : 1);
    const long turns = (outputs * bytes + threads * CHUNK_BYTES / 2) / (threads * CHUNK_BYTES);
    const long count = longer(turns, 1) * threads;
    const long size = longer((outputs + count * tile - 1) / (count * tile), 1) * tile;
    return (Chunks){size, (outputs + size - 1) / size};
}

// The outputs of a part that are in a chunk, and where the part's begin in the row.
typedef struct {
    long start, stop, offset;
} Outputs;

// Those of a part, of which there may be none.
INLINE Outputs outputs_of(const Linear *l, const Chunks *c, long place, long part) {
    long offset = 0;
    for (long i = 0; i < part; i++) offset += l->outputs[i];
    const long start = place * c->size - offset, stop = start + c->size;
    return (Outputs){longer(start, 0), stop < l->outputs[part] ? stop : l->outputs[part], offset};
}

#ifdef TILES
#include "linear_tiles.h"
#else
#include "linear_vectors.h"
#endif

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
    long rows;
    long key_width, padded;  // key_width and value_width made multiples of WIDTH and of 32
    long *first, *end;       // [rows], the positions that each sees
    float *maxima, *totals;  // [rows], of the scores so far, and of their weights
    float *scores;           // [rows, CHUNK], then weights, as numbers, at the beginning of each row
    float *sums;             // [rows, padded], of the values by their weights
    number *queries;         // [rows, key_width]
    number *keys;            // of 16 positions, [16, key_width] or as lay_out_keys puts them
    number *values;          // [padded / 32] times CHUNK positions of 32, as lay_out_values puts them
} Rows;

// How many of a row's positions from `chunk` on matter: none, or up to the last that it sees, in
// whole vectors.
INLINE long used_by(const Rows *r, long row, long chunk) {
    const long left = r->end[row] - chunk;
    if (chunk + CHUNK <= r->first[row] || left <= 0) return 0;
    return left < CHUNK ? (left + 15) / 16 * 16 : CHUNK;
}

#ifdef TILES
#include "attention_tiles.h"
#else
#include "attention_vectors.h"
#endif

// Brings the keys and values of 16 positions from `start` on next to one another. There are keys
// and values of `context` positions.
static void gather_positions(const Attention *a, const int64_t *table, long start, long context,
                             long kv_head, number *laid_out_keys, number *laid_out) {
    const number *keys[16], *values[16];
    for (long j = 0; j < 16; j++) {
        const long position = start + j < context ? start + j : context - 1;  // any that exists
        keys[j] = row_at(a->keys, a->key_width, a, table, position, kv_head);
        values[j] = row_at(a->values, a->value_width, a, table, position, kv_head);
    }
    lay_out_keys(keys, a->key_width, laid_out_keys);
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

INLINE __m512 scaled(const Attention *a, __m512 scores) {
    scores = _mm512_mul_ps(scores, _mm512_set1_ps(a->scale));
    if (a->softcap <= 0) return scores;
    const __m512 cap = _mm512_set1_ps(a->softcap);
    return _mm512_mul_ps(hyperbolic_tangent(_mm512_div_ps(scores, cap)), cap);
}

// Makes a row's scores of a chunk, before they are scaled, to weights. They are relative to the
// largest score so far: if that has grown, what there is of sums shrinks.
INLINE void weigh(const Attention *a, const Rows *r, long row, long chunk) {
    float *scores = r->scores + row * CHUNK, *sums = r->sums + row * r->padded;
    __mmask16 seen[CHUNK / 16];
    __m512 most = _mm512_set1_ps(r->maxima[row]), total = _mm512_setzero_ps();
    UNROLL for (int i = 0; i < CHUNK / 16; i++) {
        const long start = chunk + i * 16;
        seen[i] = first(r->end[row] - start) & ~first(r->first[row] - start);
        const __m512 found = scaled(a, _mm512_loadu_ps(scores + i * 16));
        _mm512_storeu_ps(scores + i * 16, found);
        most = _mm512_mask_max_ps(most, seen[i], most, found);
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
// context with a running maximum. Positions are taken CHUNK at a time from a multiple of that on,
// so the order of a token's sums depends on its sequence alone, and not on who looks beside it. The
// weights of values are rounded, as Transformers' code does.
static void attend(const Attention *a, const Tokens *tokens, long kv_head, const Rows *room) {
    const long group = a->group;
    Rows rows = *room, *r = &rows;
    r->rows = tokens->count * group;
    long context = 0, lowest = LONG_MAX;
    for (long row = 0; row < r->rows; row++) {
        const long token = row / group, head = kv_head * group + row % group;
        const number *query = tokens->queries + token * tokens->stride + head * a->key_width;
        memcpy(r->queries + row * r->key_width, query, a->key_width * sizeof(number));
        r->end[row] = tokens->contexts[token];
        r->first[row] = first_seen(a, r->end[row]);
        r->maxima[row] = a->sinks ? wide(a->sinks[head]) : -INFINITY;
        r->totals[row] = a->sinks ? 1.0f : 0.0f;
        context = longer(context, r->end[row]);
        lowest = r->first[row] < lowest ? r->first[row] : lowest;
    }
    memset(r->sums, 0, r->rows * r->padded * sizeof(float));
    for (long chunk = lowest / CHUNK * CHUNK; chunk < context; chunk += CHUNK) {
        const long seen = context - chunk < CHUNK ? context - chunk : CHUNK;
        for (long offset = 0; offset < (seen + GATHERED - 1) / GATHERED * GATHERED; offset += 16) {
            gather_positions(a, tokens->table, chunk + offset, context, kv_head, r->keys,
                             r->values + offset * 32);
            score(r, chunk, offset);
        }
        for (long row = 0; row < r->rows; row++)
            if (used_by(r, row, chunk))
                weigh(a, r, row, chunk);
            else
                memset(r->scores + row * CHUNK, 0, CHUNK * sizeof(number));
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
    const long most = (most_tokens(a) * a->group + 15) / 16 * 16;
    const long key_width = (a->key_width + WIDTH - 1) / WIDTH * WIDTH;
    const long padded = (a->value_width + 31) / 32 * 32;
    long limits[2 * most];
    float floats[most * (2 + CHUNK + padded)];
    number numbers[(most + 16) * key_width + CHUNK * padded];
    // What is beyond a row's numbers stays zero.
    if (key_width > a->key_width) memset(numbers, 0, (most + 16) * key_width * sizeof(number));
    const Rows room = {
        .key_width = key_width,
        .padded = padded,
        .first = limits,
        .end = limits + most,
        .maxima = floats,
        .totals = floats + most,
        .scores = floats + 2 * most,
        .sums = floats + (2 + CHUNK) * most,
        .queries = numbers,
        .keys = numbers + most * key_width,
        .values = numbers + (most + 16) * key_width,
    };
    long *starts = malloc((rows + 1) * sizeof(long)), tiles = 0;
    for (long row = 0; row < rows; row += together(a, row, rows, tables, blocks, contexts))
        starts[tiles++] = row;
    starts[tiles] = rows;
    begin_attention();
#pragma omp for schedule(dynamic)
    for (long item = 0; item < tiles * a->kv_heads; item++) {
        const long row = starts[item / a->kv_heads], end = starts[item / a->kv_heads + 1];
        const Tokens tokens = {
            queries + row * stride, out + row * width, stride, width, end - row,
            tables + row * blocks, contexts + row,
        };
        attend(a, &tokens, item % a->kv_heads, &room);
    }
    end_attention();
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
// tables, blocks and contexts are as in decode_attention. read: [num_read], rising: those whose
// result is wanted, at most half of the rows, with their tables and contexts; num_read is rows if
// all are.
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
