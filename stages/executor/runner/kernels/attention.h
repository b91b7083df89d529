// Attention over a paged cache.

// One layer's paged keys and values, and its options.
typedef struct {
    number *keys;                      // [blocks, block_size, kv_heads, key_width]
    number *values;                    // [blocks, block_size, kv_heads, value_width]; or keys
    long block_size, kv_heads, group;  // group: query heads of a KV head
    long key_width, value_width;       // multiples of 16
    long value_stride;                 // from one value to the next; with values in keys, key_width
    long window;                       // positions that a query sees, its own included; 0: all
    long own_chunk;        // positions of a chunk, of which a query sees its own; 0: all
    float scale, softcap;  // softcap 0: none
    const number *sinks;   // [kv_heads * group], or NULL
    // Of keys and values that are codes, [blocks, block_size, kv_heads] as bfloat16 each; or NULL.
    uint16_t *key_scales, *value_scales;
    long codes;  // INT8_CODES or FP8_CODES; 0: numbers
} Attention;

#include "attention_codes.h"

// Writes the key and the value of one token, all heads, to its slot.
INLINE void store_row(const Attention *a, const number *key, const number *value, int64_t slot) {
    const long key_row = a->kv_heads * a->key_width, value_row = a->kv_heads * a->value_width;
    if (a->codes) {
        put_heads(a, key, a->key_width, slot, a->keys, a->key_scales);
        put_heads(a, value, a->value_width, slot, a->values, a->value_scales);
        return;
    }
    memcpy(a->keys + slot * key_row, key, key_row * sizeof(number));
    if (a->values != a->keys)
        memcpy(a->values + slot * value_row, value, value_row * sizeof(number));
}

enum {
    CHUNK = 64,  // positions whose scores are held together
    ROWS = 256,  // of one KV head, that look at them together, if one token's heads are not more
};

// Positions of one sequence in a KV head.
typedef struct {
    const int64_t *table;
    long first, end;  // the first and the last one that are seen, and one more
    long kv_head;
} Context;

// Query tokens of one sequence, by strides, some of the heads that share a KV head, and contexts.
typedef struct {
    const number *queries;
    number *out;
    long stride, out_stride, count;
    long head, heads;         // the first head, and their number
    const int64_t *contexts;  // [count], at least 1 each
} Tokens;

// Finds the places of 16 positions from `start` on, among those of all slots and heads; beyond the
// context that of the last one.
INLINE void find_places(const Attention *a, const Context *c, long start, long *places) {
    const long size = a->block_size;
    if (start >= c->end) start = c->end - 1;
    long block = start / size, offset = start % size;  // divided once: it takes 20 cycles
    for (int j = 0; j < 16; j++) {
        places[j] = (c->table[block] * size + offset) * a->kv_heads + c->kv_head;
        if (start + j + 1 < c->end && ++offset == size) offset = 0, block++;
    }
}

// The first position that a query token sees.
INLINE long first_seen(const Attention *a, long context) {
    if (a->own_chunk) return (context - 1) / a->own_chunk * a->own_chunk;
    return a->window && context > a->window ? context - a->window : 0;
}

// The positions that some tokens see.
static Context context_of(const Attention *a, const int64_t *table, const int64_t *contexts,
                          long count, long kv_head) {
    Context c = {table, LONG_MAX, 0, kv_head};
    for (long i = 0; i < count; i++) {
        const long first = first_seen(a, contexts[i]);
        c.first = first < c.first ? first : c.first;
        c.end = larger(c.end, contexts[i]);
    }
    return c;
}

// State of attend for its rows: the query heads of a KV head, token by token.
typedef struct {
    long rows;
    long key_width, padded;  // key_width and value_width made multiples of WIDTH and of 32
    long *first, *end;       // [rows], the positions that each sees
    float *references;       // [rows], the score of weight 1; none is LIMIT octaves above it
    float *totals;           // [rows, 16], of the weights so far, lane by lane
    float *sums;             // [rows, padded], weighted sums of values
    float *scores;           // [TILE_ROWS, CHUNK], of the rows in work
    Operand *weights;        // [rows, CHUNK]
    Operand *queries;        // [rows, key_width]
    Operand *keys;           // [CHUNK / 32] times key_width numbers of 32 positions, and
    Operand *values;         // [padded / 32] times CHUNK positions of 32: the layout of add_values
} Rows;

// The number of a row's visible positions from `chunk` on, in whole vectors.
INLINE long used_by(const Rows *r, long row, long chunk) {
    const long left = r->end[row] - chunk;
    if (chunk + CHUNK <= r->first[row] || left <= 0) return 0;
    return left < CHUNK ? (left + 15) / 16 * 16 : CHUNK;
}

// The largest of it for some rows.
INLINE long used_by_any(const Rows *r, long row, long count, long chunk) {
    long used = 0;
    for (long i = 0; i < count; i++) used = larger(used, used_by(r, row + i, chunk));
    return used;
}

#ifdef TILES
#include "attention_tiles.h"
#else
#include "attention_vectors.h"
#endif

// Up to WIDTH numbers, as operands in their order.
INLINE Floats load_key(const number *p, long count) {
#ifdef AVX2
    (void)count;  // a multiple of it
    return (Floats){load(p, 0, ALL_LANES), load(p, 1, ALL_LANES)};
#else
    return (Floats)load(p, 0, lanes(count));
#endif
}

// Lays a number of 16 positions' keys, or two that one instruction multiplies, side by side, beside
// those of 16 others.
INLINE void lay_out_keys(const number *const *keys, long width, float *to) {
    for (long i = 0; i < width; i += WIDTH, to += 16 * 32) {
        Floats v[16];
        UNROLL
        for (int j = 0; j < 16; j++) v[j] = load_key(keys[j] + i, width - i);
        transpose(v);
        UNROLL
        for (int j = 0; j < 16; j++) store_floats(to + j * 32, v[j]);
    }
}

// Lays out the numbers at 16 places.
INLINE void lay_out_numbers(const Attention *a, const long *places, float *laid_out_keys,
                            Operand *laid_out) {
    const number *keys[16], *values[16];
    for (int j = 0; j < 16; j++) {
        keys[j] = a->keys + places[j] * a->key_width;
        values[j] = a->values + places[j] * a->value_stride;
    }
    lay_out_keys(keys, a->key_width, laid_out_keys);
    for (long i = 0; i < a->value_width; i += 32)
        lay_out_values(values, i, a->value_width - i, laid_out + i * CHUNK);
}

// Lays out the codes at 16 places, as numbers.
INLINE void lay_out_codes(int codes, const Attention *a, const long *places, float *laid_out_keys,
                          Operand *laid_out) {
    const long width = a->key_width;
    __attribute__((aligned(64))) number unpacked[16 * width];
    const number *keys[16];
    for (int j = 0; j < 16; j++) {
        unpack(codes, a->keys, a->key_scales, places[j], width, unpacked + j * width);
        keys[j] = unpacked + j * width;
    }
    lay_out_keys(keys, width, laid_out_keys);
    for (int j = 0; j < 16; j += 2)
        for (long i = 0; i < a->value_width; i += 32)
            lay_out_two(codes, a->values, a->value_scales, places + j, a->value_width, i,
                        laid_out + i * CHUNK + j * 32);
}

// Lays out the keys and values of 16 positions from `start` on.
static void gather(const Attention *a, const Context *c, long start, float *keys, Operand *values) {
    long places[16];
    find_places(a, c, start, places);
    switch (a->codes) {
    case 0: lay_out_numbers(a, places, keys, values); break;
    case INT8_CODES: lay_out_codes(INT8_CODES, a, places, keys, values); break;
    default: lay_out_codes(FP8_CODES, a, places, keys, values); break;
    }
}

INLINE void prefetch(const void *from, long bytes) {
    for (long i = 0; i < bytes; i += 64) _mm_prefetch((const char *)from + i, _MM_HINT_T1);
}

// Prefetches 16 positions from `start` on, since paged ones defeat hardware prefetching. The
// first-level cache holds only eight rows that are a multiple of 4 KiB apart. Inlined: GCC drops
// calls of functions without other effects.
INLINE void prefetch_positions(const Attention *a, const Context *c, long start) {
    const long size = a->codes ? 1 : sizeof(number), width = a->key_width * size;
    long places[16];
    if (start >= c->end) return;
    find_places(a, c, start, places);
    for (int j = 0; j < 16; j++) {
        prefetch((const char *)a->keys + places[j] * width, width);
        prefetch((const char *)a->values + places[j] * a->value_stride * size,
                 a->value_width * size);
        if (a->codes)
            prefetch(a->key_scales + places[j], 1), prefetch(a->value_scales + places[j], 1);
    }
}

enum { LIMIT = 8 };

#define OCTAVES_OF_E 1.44269504088896341f

// What scores are multiplied by for their weights to be powers of two.
INLINE float octaves(const Attention *a) {
    return (a->softcap > 0 ? 1.0f : a->scale) * OCTAVES_OF_E;
}

INLINE Floats capped(const Attention *a, Floats scores) {
    if (a->softcap <= 0) return scores;
    const Floats cap = spread(a->softcap), inner = spread(a->scale / a->softcap);
    return multiply(hyperbolic_tangent(multiply(scores, inner)), cap);
}

// 2^x to about 1e-7 relative, with a minimax polynomial; 0 below the least float, for -inf too. NaN
// stays NaN, as in exponential.
INLINE Floats powers_of_two(Floats x) {
    x = maximum(spread(-150.0f), x);
    const Floats n = nearest(x), f = subtract(x, n);
    Floats y = spread(1.32647273e-3f);
    y = multiply_add(y, f, spread(9.67151299e-3f));
    y = multiply_add(y, f, spread(5.55073358e-2f));
    y = multiply_add(y, f, spread(2.40222424e-1f));
    y = multiply_add(y, f, spread(6.93147004e-1f));
    y = multiply_add(y, f, spread(1.0f));
    return times_power_of_two(y, n);
}

// Makes a row's largest score its reference, and rescales its sums.
static __attribute__((noinline)) void refer(const Rows *r, long row, float factor, Floats most) {
    const float largest = largest_of(most);
    const Floats shrink = spread(exp2f((r->references[row] - largest) * factor));
    float *totals = r->totals + row * 16, *sums = r->sums + row * r->padded;
    r->references[row] = largest;
    store_floats(totals, multiply(load_floats(totals), shrink));
    for (long i = 0; i < r->padded; i += 16)
        store_floats(sums + i, multiply(load_floats(sums + i), shrink));
}

// Stores 32 weights, and adds them as they are stored to sums of each lane or two.
INLINE Floats put_weights(Floats total, Floats x, Floats y, Operand *to) {
#if defined(AVX2) || defined(FLOAT32)
    store_operands(to, x);
    store_operands(to + 16, y);
    return add(add(total, rounded(x)), rounded(y));
#else
    const __m512i both = narrow_both(x, y);
    _mm512_storeu_si512(to, both);
    return _mm512_dpbf16_ps(total, (Numbers)both, (Numbers)_mm512_set1_epi16(0x3f80));  // ones
#endif
}

// Turns a row's scores of a chunk into weights. whole: the row sees all of it.
INLINE void weigh_chunk(const Attention *a, const Rows *r, long row, float *scores, long chunk,
                        int whole) {
    const float factor = octaves(a);
    const Floats octave = spread(factor);
    float *totals = r->totals + row * 16;
    Mask seen[CHUNK / 16];
    Floats found[CHUNK / 16], most = spread(-INFINITY);
    UNROLL
    for (int i = 0; i < CHUNK / 16; i++) {
        const long start = chunk + i * 16;
        seen[i] = first(r->end[row] - start) & ~first(r->first[row] - start);
        found[i] = capped(a, load_floats(scores + i * 16));
        const Floats larger = maximum(most, found[i]);
        most = whole ? larger : merged(most, seen[i], larger);
    }
    // Seldom after the first chunk.
    if (any_greater(most, spread(r->references[row] + LIMIT / factor))) refer(r, row, factor, most);
    const Floats reference = spread(r->references[row] * factor);
    Floats total = load_floats(totals);
    UNROLL
    for (int i = 0; i < CHUNK / 16; i++) {
        found[i] = powers_of_two(subtract(multiply(found[i], octave), reference));
        if (!whole) found[i] = only(seen[i], found[i]);
    }
    UNROLL
    for (int i = 0; i < CHUNK / 16; i += 2)
        total = put_weights(total, found[i], found[i + 1], r->weights + row * CHUNK + i * 16);
    store_floats(totals, total);
}

static void weigh(const Attention *a, const Rows *r, long row, float *scores, long chunk) {
    if (!used_by(r, row, chunk))
        memset(r->weights + row * CHUNK, 0, CHUNK * sizeof(Operand));
    else if (r->first[row] <= chunk && chunk + CHUNK <= r->end[row])
        weigh_chunk(a, r, row, scores, chunk, 1);
    else
        weigh_chunk(a, r, row, scores, chunk, 0);
}

// Writes the outputs of the rows.
static void put_rows(const Attention *a, const Rows *r, const Tokens *tokens) {
    const long heads = tokens->heads, width = a->value_width;
    for (long row = 0; row < r->rows; row++) {
        const Floats total = spread(sum_of(load_floats(r->totals + row * 16)));
        number *to =
            tokens->out + row / heads * tokens->out_stride + (tokens->head + row % heads) * width;
        for (long i = 0; i < width; i += 32) {
            const float *from = r->sums + row * r->padded + i;
            Floats x = divide(load_floats(from), total);
            Floats y = divide(load_floats(from + 16), total);
            put_in_order(&x, &y);
            store_narrow_some(to + i, first(width - i), x);
            store_narrow_some(to + i + 16, first(width - i - 16), y);
        }
    }
}

// The attention of heads that share a KV head, of some query tokens, in one pass over their
// context with a running maximum. Positions are taken CHUNK at a time from a multiple of that on,
// so the order of a token's sums depends on its sequence alone, not on other query tokens. Weights
// are rounded before the product with values, as in Transformers' code. `next`: what this thread is
// likely to process next.
static void attend(const Attention *a, const Tokens *tokens, const Context *c, const Context *next,
                   const Rows *room) {
    const long heads = tokens->heads;
    Rows rows = *room, *r = &rows;
    r->rows = tokens->count * heads;
    const long tile = tile_of(r->rows);
    memset(r->totals, 0, r->rows * 16 * sizeof(float));
    memset(r->sums, 0, r->rows * r->padded * sizeof(float));
    for (long row = 0; row < r->rows; row++) {
        const long token = row / heads, head = tokens->head + row % heads;
        const number *query = tokens->queries + token * tokens->stride + head * a->key_width;
        lay_out_operands(query, a->key_width, r->queries + row * r->key_width);
        r->end[row] = tokens->contexts[token];
        r->first[row] = first_seen(a, r->end[row]);
        r->references[row] =
            a->sinks ? wide(a->sinks[head]) * OCTAVES_OF_E / octaves(a) : -INFINITY;
        r->totals[row * 16] = a->sinks ? 1.0f : 0.0f;
    }
    for (long chunk = c->first / CHUNK * CHUNK; chunk < c->end; chunk += CHUNK) {
        const int last = chunk + CHUNK >= c->end;
        const long ahead = last ? next->first / CHUNK * CHUNK : chunk + CHUNK;
        for (long offset = 0; offset < CHUNK; offset += 16) {
            // Products take 32 at a time.
            if (chunk + offset / 32 * 32 < c->end)
                gather(a, c, chunk + offset,
                       (float *)(r->keys + offset / 32 * 32 * r->key_width) + offset % 32,
                       r->values + offset * 32);
            prefetch_positions(a, last ? next : c, ahead + offset);
        }
        for (long row = 0; row < r->rows; row += tile) {
            const long some = r->rows - row < tile ? r->rows - row : tile;
            score(r, row, some, used_by_any(r, row, some, chunk));
            for (long i = 0; i < some; i++) weigh(a, r, row + i, r->scores + i * CHUNK, chunk);
        }
        add_chunk(r, chunk);
    }
    put_rows(a, r, tokens);
}

// The most tokens per call of attend.
INLINE long most_tokens(const Attention *a) { return larger(ROWS / a->group, 1); }

// The number of rows, from one on, that are neighbouring tokens of one sequence and share its
// blocks. It doesn't affect a row's bits.
static long together(const Attention *a, long row, long rows, const int64_t *tables, long blocks,
                     const int64_t *contexts) {
    const int64_t *table = tables + row * blocks;
    const long most = most_tokens(a);
    long count = 1;
    while (count < most && row + count < rows) {
        const long here = contexts[row], there = contexts[row + count];
        const long shared = (larger(here, there) + a->block_size - 1) / a->block_size;
        if (labs(here - there) > CHUNK) break;
        if (memcmp(table, table + count * blocks, shared * sizeof(int64_t))) break;
        count++;
    }
    return count;
}

// The number of heads that share a KV head and are computed together: all, unless threads would be
// idle. It doesn't affect a row's bits.
INLINE long heads_together(const Attention *a, long tiles) {
    const long items = larger(tiles * a->kv_heads, 1);  // a step may read no row
    const long threads = omp_get_num_threads();
    const long parts = (threads + items - 1) / items;
    return (a->group + parts * GRAIN - 1) / (parts * GRAIN) * GRAIN;
}

static void decode_attention_by_team(const Attention *a, const number *queries, long stride,
                                     number *out, long rows, const int64_t *tables, long blocks,
                                     const int64_t *contexts) {
    const long width = a->kv_heads * a->group * a->value_width;
    const long most = (most_tokens(a) * a->group + 15) / 16 * 16;
    const long key_width = (a->key_width + WIDTH - 1) / WIDTH * WIDTH;
    const long padded = (a->value_width + 31) / 32 * 32;
    long limits[2 * most];
    float floats[most * (1 + 16 + padded) + TILE_ROWS * CHUNK];
    Operand operands[most * (key_width + CHUNK) + CHUNK * (key_width + padded)];
    // Padding beyond a row's numbers stays zero.
    if (key_width > a->key_width) memset(operands, 0, most * key_width * sizeof(Operand));
    const Rows room = {
        .key_width = key_width,
        .padded = padded,
        .first = limits,
        .end = limits + most,
        .references = floats,
        .totals = floats + most,
        .sums = floats + 17 * most,
        .scores = floats + (17 + padded) * most,
        .queries = operands,
        .weights = operands + most * key_width,
        .keys = operands + most * (key_width + CHUNK),
        .values = operands + most * (key_width + CHUNK) + CHUNK * key_width,
    };
    long *starts = malloc((rows + 1) * sizeof(long)), tiles = 0;
    for (long row = 0; row < rows; row += together(a, row, rows, tables, blocks, contexts))
        starts[tiles++] = row;
    starts[tiles] = rows;
    const long heads = heads_together(a, tiles), parts = (a->group + heads - 1) / heads;
    const long per_tile = a->kv_heads * parts;
    begin_attention();
#pragma omp for schedule(dynamic)
    for (long item = 0; item < tiles * per_tile; item++) {
        const long row = starts[item / per_tile], end = starts[item / per_tile + 1];
        const long kv_head = item % per_tile / parts, from = item % parts * heads;
        const Tokens tokens = {
            .queries = queries + row * stride,
            .out = out + row * width,
            .stride = stride,
            .out_stride = width,
            .count = end - row,
            .head = kv_head * a->group + from,
            .heads = from + heads < a->group ? heads : a->group - from,
            .contexts = contexts + row,
        };
        const Context c = context_of(a, tables + row * blocks, contexts + row, end - row, kv_head);
        // The likely next item of this thread.
        const long later = item + omp_get_num_threads(), tile = later / per_tile;
        Context next = {0};
        if (tile < tiles)
            next = context_of(a, tables + starts[tile] * blocks, contexts + starts[tile], 1,
                              later % per_tile / parts);
        attend(a, &tokens, &c, &next, &room);
    }
    end_attention();
    free(starts);
}
