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
    ROWS = 128,  // of one KV head, that look at them together, if one token's heads are not more
};

// Query tokens of one sequence, by strides, some of the heads that share a KV head, and contexts.
typedef struct {
    const number *queries;
    number *out;
    long stride, out_stride, count;
    long head, heads;                 // the first head, and their number
    const int64_t *table, *contexts;  // contexts: [count], at least 1 each
} Tokens;

// Finds the places of a head of 16 positions from `start` on, among those of all slots; beyond the
// context that of the last one.
INLINE void find_places(const Attention *a, const int64_t *table, long start, long context,
                        long kv_head, long *places) {
    const long size = a->block_size;
    if (start >= context) start = context - 1;
    long block = start / size, offset = start % size;  // divided once: it takes 20 cycles
    for (int j = 0; j < 16; j++) {
        places[j] = (table[block] * size + offset) * a->kv_heads + kv_head;
        if (start + j + 1 < context && ++offset == size) offset = 0, block++;
    }
}

// The first position that a query token sees.
INLINE long first_seen(const Attention *a, long context) {
    if (a->own_chunk) return (context - 1) / a->own_chunk * a->own_chunk;
    return a->window && context > a->window ? context - a->window : 0;
}

// State of attend for its rows: the query heads of a KV head, token by token.
typedef struct {
    long rows;
    long key_width, padded;  // key_width and value_width made multiples of WIDTH and of 32
    long *first, *end;       // [rows], the positions that each sees
    float *maxima, *totals;  // [rows], of the scores and weights so far
    float *scores;     // [rows, CHUNK], then weights, as operands, at the beginning of each row
    float *sums;       // [rows, padded], weighted sums of values
    Operand *queries;  // [rows, key_width]
    Operand *keys;     // of 16 positions, [16, key_width] or the layout of lay_out_keys
    Operand *values;   // [padded / 32] times CHUNK positions of 32, the layout of lay_out_values
} Rows;

// The number of a row's visible positions from `chunk` on, in whole vectors.
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

INLINE void prefetch(const void *from, long bytes) {
    for (long i = 0; i < bytes; i += 64) _mm_prefetch((const char *)from + i, _MM_HINT_T1);
}

// Lays out the numbers at 16 places.
INLINE void lay_out_numbers(const Attention *a, const long *places, Operand *laid_out_keys,
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
INLINE void lay_out_codes(int codes, const Attention *a, const long *places, Operand *laid_out_keys,
                          Operand *laid_out) {
    const long width = a->key_width, padded = (width + WIDTH - 1) / WIDTH * WIDTH;
    __attribute__((aligned(64))) number unpacked[KEYS_AS_NUMBERS ? 1 : 16 * width];
    const number *keys[16];
    for (int j = 0; j < 16; j++) {
        number *to = unpacked + j * width;
        if (KEYS_AS_NUMBERS) to = (number *)(laid_out_keys + j * padded);
        unpack(codes, a->keys, a->key_scales, places[j], width, to);
        keys[j] = to;
    }
    if (!KEYS_AS_NUMBERS) lay_out_keys(keys, width, laid_out_keys);
    for (int j = 0; j < 16; j += 2)
        for (long i = 0; i < a->value_width; i += 32)
            lay_out_two(codes, a->values, a->value_scales, places + j, a->value_width, i,
                        laid_out + i * CHUNK + j * 32);
}

// Gathers the keys and values of 16 positions from `start` on. The context has `context` positions.
// codes: as in Attention.
INLINE void gather_positions(int codes, const Attention *a, const int64_t *table, long start,
                             long context, long kv_head, Operand *laid_out_keys,
                             Operand *laid_out) {
    long places[16];
    find_places(a, table, start, context, kv_head, places);
    if (codes)
        lay_out_codes(codes, a, places, laid_out_keys, laid_out);
    else
        lay_out_numbers(a, places, laid_out_keys, laid_out);
    // Paged positions defeat hardware prefetching. The first-level cache holds only eight rows that
    // are a multiple of 4 KiB apart.
    const long size = codes ? 1 : sizeof(number), width = a->key_width * size;
    if (start + CHUNK >= context) return;
    find_places(a, table, start + CHUNK, context, kv_head, places);
    for (int j = 0; j < 16; j++) {
        prefetch((const char *)a->keys + places[j] * width, width);
        prefetch((const char *)a->values + places[j] * a->value_stride * size,
                 a->value_width * size);
        if (codes) prefetch(a->key_scales + places[j], 1), prefetch(a->value_scales + places[j], 1);
    }
}

static void gather(const Attention *a, const int64_t *table, long start, long context, long kv_head,
                   Operand *keys, Operand *values) {
    switch (a->codes) {
    case 0: gather_positions(0, a, table, start, context, kv_head, keys, values); break;
    case INT8_CODES:
        gather_positions(INT8_CODES, a, table, start, context, kv_head, keys, values);
        break;
    default: gather_positions(FP8_CODES, a, table, start, context, kv_head, keys, values); break;
    }
}

INLINE Floats scaled(const Attention *a, Floats scores) {
    scores = multiply(scores, spread(a->scale));
    if (a->softcap <= 0) return scores;
    const Floats cap = spread(a->softcap);
    return multiply(hyperbolic_tangent(divide(scores, cap)), cap);
}

// Turns a row's unscaled scores of a chunk into weights, relative to the largest score so far. If
// that has grown, the sums are rescaled.
INLINE void weigh(const Attention *a, const Rows *r, long row, long chunk) {
    float *scores = r->scores + row * CHUNK, *sums = r->sums + row * r->padded;
    Mask seen[CHUNK / 16];
    Floats most = spread(r->maxima[row]), total = zeros();
    UNROLL
    for (int i = 0; i < CHUNK / 16; i++) {
        const long start = chunk + i * 16;
        seen[i] = first(r->end[row] - start) & ~first(r->first[row] - start);
        const Floats found = scaled(a, load_floats(scores + i * 16));
        store_floats(scores + i * 16, found);
        most = merged(most, seen[i], maximum(most, found));
    }
    const float largest = largest_of(most), before = r->maxima[row];
    if (largest > before && before > -INFINITY) {
        const float less = expf(before - largest);
        const Floats shrink = spread(less);
        r->totals[row] *= less;
        for (long i = 0; i < r->padded; i += 16)
            store_floats(sums + i, multiply(load_floats(sums + i), shrink));
    }
    r->maxima[row] = largest;
    most = spread(largest);
    UNROLL
    for (int i = 0; i < CHUNK / 16; i++) {
        Floats weights = exponential(subtract(load_floats(scores + i * 16), most));
        weights = only(seen[i], weights);
        total = add(total, rounded(weights));
        store_operands((Operand *)scores + i * 16, weights);  // over scores already read
    }
    r->totals[row] += sum_of(total);
}

// Writes the outputs of the rows.
static void put_rows(const Attention *a, const Rows *r, const Tokens *tokens) {
    const long heads = tokens->heads, width = a->value_width;
    for (long row = 0; row < r->rows; row++) {
        const Floats total = spread(r->totals[row]);
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
// are rounded before the product with values, as in Transformers' code.
static void attend(const Attention *a, const Tokens *tokens, long kv_head, const Rows *room) {
    const long heads = tokens->heads;
    Rows rows = *room, *r = &rows;
    r->rows = tokens->count * heads;
    long context = 0, lowest = LONG_MAX;
    for (long row = 0; row < r->rows; row++) {
        const long token = row / heads, head = tokens->head + row % heads;
        const number *query = tokens->queries + token * tokens->stride + head * a->key_width;
        lay_out_operands(query, a->key_width, r->queries + row * r->key_width);
        r->end[row] = tokens->contexts[token];
        r->first[row] = first_seen(a, r->end[row]);
        r->maxima[row] = a->sinks ? wide(a->sinks[head]) : -INFINITY;
        r->totals[row] = a->sinks ? 1.0f : 0.0f;
        context = larger(context, r->end[row]);
        lowest = r->first[row] < lowest ? r->first[row] : lowest;
    }
    memset(r->sums, 0, r->rows * r->padded * sizeof(float));
    for (long chunk = lowest / CHUNK * CHUNK; chunk < context; chunk += CHUNK) {
        const long seen = context - chunk < CHUNK ? context - chunk : CHUNK;
        for (long offset = 0; offset < (seen + GATHERED - 1) / GATHERED * GATHERED; offset += 16) {
            gather(a, tokens->table, chunk + offset, context, kv_head, r->keys,
                   r->values + offset * 32);
            score(r, chunk, offset);
        }
        for (long row = 0; row < r->rows; row++)
            if (used_by(r, row, chunk))
                weigh(a, r, row, chunk);
            else
                memset(r->scores + row * CHUNK, 0, CHUNK * sizeof(Operand));
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
    float floats[most * (2 + CHUNK + padded)];
    Operand operands[(most + 16) * key_width + CHUNK * padded];
    // Padding beyond a row's numbers stays zero.
    if (key_width > a->key_width) memset(operands, 0, (most + 16) * key_width * sizeof(Operand));
    const Rows room = {
        .key_width = key_width,
        .padded = padded,
        .first = limits,
        .end = limits + most,
        .maxima = floats,
        .totals = floats + most,
        .scores = floats + 2 * most,
        .sums = floats + (2 + CHUNK) * most,
        .queries = operands,
        .keys = operands + most * key_width,
        .values = operands + (most + 16) * key_width,
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
            .table = tables + row * blocks,
            .contexts = contexts + row,
        };
        attend(a, &tokens, kv_head, &room);
    }
    end_attention();
    free(starts);
}
