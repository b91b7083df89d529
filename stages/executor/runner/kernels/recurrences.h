// States of heads that each token changes by a matrix of rank one: the gated delta rule, Mamba2's
// scan, lightning attention.
//
// One token after the other, and each number in one order of operations. So a token's output and
// state have the same bits however tokens are divided into segments, calls, columns and threads.

// Runs of consecutive tokens, each of one sequence. Those of one slot are side by side, in order.
typedef struct {
    const int64_t *first, *count;  // tokens
    const int64_t *slot;           // row of the state tensors that has the state
    const int64_t *save;           // row that gets a copy of the state behind the run, or -1
    long segments;
} Segments;

INLINE int continues(const Segments *s, long segment) {
    return segment > 0 && s->slot[segment] == s->slot[segment - 1];
}

INLINE long tokens_of(const Segments *s) {
    long tokens = 0;
    for (long segment = 0; segment < s->segments; segment++) tokens += s->count[segment];
    return tokens;
}

// State S of a head, token by token, with its key k, query q, value v and decay d:
// S = d S + k (f v)^T; with betas, S = d S + k (beta (v - (d S)^T k))^T. The output is S^T q, plus
// the value times `residual`.
typedef struct {
    const number *queries, *keys;  // [tokens, groups, key_width], tokens their strides apart
    const number *values;          // [tokens, heads, value_width], likewise
    long query_stride, key_stride, value_stride;
    const float *decays;    // [tokens, heads] or, by_channel, [tokens, heads, key_width]
    long decay_stride;      // between tokens
    const float *betas;     // [tokens, heads], or NULL: no delta rule
    const float *factors;   // [tokens, heads], f; or NULL: 1
    const float *residual;  // [heads], or NULL: none
    float *state;           // [slots, heads, key_width, value_width]
    void *out;              // [tokens, heads, value_width]: numbers, or floats if wide
    long groups, heads, key_width, value_width;
    long by_channel, wide;
    long logarithms;  // decays are these
    long normalised;  // keys and queries to length 1
    float scale;      // of queries
} Recurrence;

enum {
    PREPARED = 32,  // tokens of a head that are prepared together
    NARROW = 2,     // vectors of a state's row, for several tokens: their columns stay in the cache
#ifdef AVX2
    BROAD = 2,
#else
    BROAD = 8,  // the same for one token: memory is read in its order
#endif
    TOGETHER = 4,  // tokens per pass over a state's columns, without delta rule
};

// Tokens of one head. `read` and `queries` have the decay already in the delta rule, so that state
// and decay are multiplied once.
typedef struct {
    float *keys, *read, *queries, *decays;  // [PREPARED, key_width]; decays: [PREPARED] by head
    float overlaps[PREPARED];               // key times query
} Prepared;

INLINE Floats inverse_length(Floats squares) {
    return spread(1.0f / sqrtf(sum_of(squares) + 1e-6f));
}

static void prepare(const Recurrence *r, const Prepared *p, float *overlaps, long head, long token,
                    long count) {
    const long width = r->key_width, group = head / (r->heads / r->groups);
    for (long t = 0; t < count; t++) {
        const number *query = r->queries + (token + t) * r->query_stride + group * width;
        const number *key = r->keys + (token + t) * r->key_stride + group * width;
        const float *decay =
            r->decays + (token + t) * r->decay_stride + (r->by_channel ? head * width : head);
        Floats of_query = spread(1.0f), of_key = spread(1.0f), overlap = zeros();
        if (r->normalised) {
            Floats queries = zeros(), keys = zeros();
            for (long i = 0; i < width; i += 16) {
                const Mask mask = first(width - i);
                const Floats q = load_wide_some(query + i, mask), k = load_wide_some(key + i, mask);
                queries = multiply_add(q, q, queries);
                keys = multiply_add(k, k, keys);
            }
            of_query = inverse_length(queries);
            of_key = inverse_length(keys);
        }
        Floats kept = zeros();
        if (!r->by_channel) {
            kept = r->logarithms ? exponential(spread(*decay)) : spread(*decay);
            store_floats_some(p->decays + t, 1, kept);
        }
        for (long i = 0; i < width; i += 16) {
            const Mask mask = first(width - i);
            Floats q =
                multiply(multiply(load_wide_some(query + i, mask), of_query), spread(r->scale));
            const Floats k = multiply(load_wide_some(key + i, mask), of_key);
            overlap = multiply_add(q, k, overlap);
            if (r->by_channel) {
                kept = exponential(load_floats_some(decay + i, mask));
                store_floats_some(p->decays + t * width + i, mask, kept);
            }
            store_floats_some(p->keys + t * width + i, mask, k);
            if (r->betas) {
                store_floats_some(p->read + t * width + i, mask, multiply(k, kept));
                q = multiply(q, kept);
            }
            store_floats_some(p->queries + t * width + i, mask, q);
        }
        overlaps[t] = sum_of(overlap);
    }
}

// Some vectors of a state's rows, and the same of values and outputs, of prepared tokens.
typedef struct {
    float *state;
    const number *values;
    char *out;
    const float *betas, *factors;  // [tokens], `heads` apart
    float residual;
    long count;
} Columns;

INLINE void put_output(const Recurrence *r, const Columns *c, long t, long at, Mask mask,
                       Floats v) {
    const long place = t * r->heads * r->value_width + at;
    if (r->residual)
        v = multiply_add(spread(c->residual),
                         load_wide_some(c->values + t * r->value_stride + at, mask), v);
    if (r->wide)
        store_floats_some((float *)c->out + place, mask, v);
    else
        store_narrow_some((number *)c->out + place, mask, v);
}

INLINE Floats decay_of(const Prepared *p, long width, long t, long i, int by_channel) {
    return spread(by_channel ? p->decays[t * width + i] : p->decays[t]);
}

// The delta rule. While a token changes the state, the next one reads it.
INLINE void delta_rule(int vectors, Mask mask, int by_channel, const Recurrence *r,
                       const Prepared *p, const Columns *c) {
    const long width = r->key_width, stride = r->value_width;
    Floats known[BROAD], found[BROAD], change[BROAD];
    UNROLL
    for (int v = 0; v < vectors; v++) known[v] = found[v] = zeros();
    for (long i = 0; i < width; i++) {
        const Floats k = spread(p->read[i]), q = spread(p->queries[i]);
        UNROLL
        for (int v = 0; v < vectors; v++) {
            const Floats s = load_floats_some(c->state + i * stride + v * 16, mask);
            known[v] = multiply_add(s, k, known[v]);
            found[v] = multiply_add(s, q, found[v]);
        }
    }
    for (long t = 0; t < c->count; t++) {
        const Floats beta = spread(c->betas[t * r->heads]), overlap = spread(p->overlaps[t]);
        UNROLL
        for (int v = 0; v < vectors; v++) {
            const number *value = c->values + t * r->value_stride + v * 16;
            change[v] = multiply(subtract(load_wide_some(value, mask), known[v]), beta);
            put_output(r, c, t, v * 16, mask, multiply_add(overlap, change[v], found[v]));
            known[v] = found[v] = zeros();
        }
        const float *keys = p->keys + t * width;
        const float *read = p->read + (t + 1) * width, *queries = p->queries + (t + 1) * width;
        const int more = t + 1 < c->count;
        for (long i = 0; i < width; i++) {
            const Floats added = spread(keys[i]), kept = decay_of(p, width, t, i, by_channel);
            const Floats k = more ? spread(read[i]) : zeros(), q = more ? spread(queries[i]) : k;
            UNROLL
            for (int v = 0; v < vectors; v++) {
                float *const place = c->state + i * stride + v * 16;
                const Floats s =
                    multiply_add(added, change[v], multiply(load_floats_some(place, mask), kept));
                store_floats_some(place, mask, s);
                if (!more) continue;
                known[v] = multiply_add(s, k, known[v]);
                found[v] = multiply_add(s, q, found[v]);
            }
        }
    }
}

// The same without delta rule, from token `t` on.
INLINE void accumulate(int vectors, int tokens, Mask mask, int by_channel, const Recurrence *r,
                       const Prepared *p, const Columns *c, long t) {
    const long width = r->key_width, stride = r->value_width;
    Floats added[TOGETHER][BROAD], found[TOGETHER][BROAD];
    UNROLL
    for (int a = 0; a < tokens; a++) UNROLL
    for (int v = 0; v < vectors; v++) {
        added[a][v] = load_wide_some(c->values + (t + a) * r->value_stride + v * 16, mask);
        if (c->factors) added[a][v] = multiply(added[a][v], spread(c->factors[(t + a) * r->heads]));
        found[a][v] = zeros();
    }
    for (long i = 0; i < width; i++) {
        Floats s[BROAD];
        UNROLL
        for (int v = 0; v < vectors; v++)
            s[v] = load_floats_some(c->state + i * stride + v * 16, mask);
        UNROLL
        for (int a = 0; a < tokens; a++) {
            const Floats k = spread(p->keys[(t + a) * width + i]);
            const Floats q = spread(p->queries[(t + a) * width + i]);
            const Floats kept = decay_of(p, width, t + a, i, by_channel);
            UNROLL
            for (int v = 0; v < vectors; v++) {
                s[v] = multiply_add(k, added[a][v], multiply(s[v], kept));
                found[a][v] = multiply_add(s[v], q, found[a][v]);
            }
        }
        UNROLL
        for (int v = 0; v < vectors; v++)
            store_floats_some(c->state + i * stride + v * 16, mask, s[v]);
    }
    UNROLL
    for (int a = 0; a < tokens; a++) UNROLL
    for (int v = 0; v < vectors; v++) put_output(r, c, t + a, v * 16, mask, found[a][v]);
}

INLINE void advance_by(int vectors, Mask mask, int by_channel, const Recurrence *r,
                       const Prepared *p, const Columns *c) {
    if (r->betas) {
        delta_rule(vectors, mask, by_channel, r, p, c);
        return;
    }
    long t = 0;
    if (vectors <= NARROW)
        for (; t + TOGETHER <= c->count; t += TOGETHER)
            accumulate(vectors, TOGETHER, mask, by_channel, r, p, c, t);
    for (; t < c->count; t++) accumulate(vectors, 1, mask, by_channel, r, p, c, t);
}

// With constants, so that the loops are compiled for each.
static void advance(int vectors, Mask mask, const Recurrence *r, const Prepared *p,
                    const Columns *c) {
#define ADVANCE(n, m) (r->by_channel ? advance_by(n, m, 1, r, p, c) : advance_by(n, m, 0, r, p, c))
    if (vectors > NARROW)
        ADVANCE(BROAD, 0xffff);
    else if (vectors == NARROW)
        ADVANCE(NARROW, 0xffff);
    else
        ADVANCE(1, mask);
#undef ADVANCE
}

// Columns `start` to `stop` of a head's state, over consecutive prepared tokens.
static void advance_columns(const Recurrence *r, const Prepared *p, long head, long slot,
                            long token, long count, long start, long stop) {
    const long width = r->value_width, number_width = r->wide ? sizeof(float) : sizeof(number);
    const long scalars = token * r->heads + head;
    Columns columns = {
        .betas = r->betas ? r->betas + scalars : NULL,
        .factors = r->factors ? r->factors + scalars : NULL,
        .residual = r->residual ? r->residual[head] : 0.0f,
        .count = count,
    };
    float *const state = r->state + (slot * r->heads + head) * r->key_width * width;
    for (long column = start, vectors; column < stop; column += vectors * 16) {
        const long left = stop - column;
        vectors = count == 1 && left >= 16 * BROAD ? BROAD : left >= 16 * NARROW ? NARROW : 1;
        columns.state = state + column;
        columns.values = r->values + token * r->value_stride + head * width + column;
        columns.out = (char *)r->out + (scalars * width + column) * number_width;
        advance(vectors, first(left), r, p, &columns);
    }
}

// One head's columns through the segments of a slot, the first of which is `segment`.
static void follow_slot(const Recurrence *r, const Segments *s, long segment, long head, long start,
                        long stop) {
    const long width = r->key_width, all = PREPARED * width;
    float *memory = memory_for((4 * all + PREPARED) * sizeof(float));
    Prepared p = {memory, memory + all, memory + 2 * all, memory + 3 * all, {0}};
    do {
        const long end = s->first[segment] + s->count[segment];
        for (long token = s->first[segment]; token < end; token += PREPARED) {
            const long count = end - token < PREPARED ? end - token : PREPARED;
            prepare(r, &p, p.overlaps, head, token, count);
            advance_columns(r, &p, head, s->slot[segment], token, count, start, stop);
        }
        if (s->save[segment] < 0) continue;
        const long size = width * r->value_width;
        const float *from = r->state + (s->slot[segment] * r->heads + head) * size;
        float *to = r->state + (s->save[segment] * r->heads + head) * size;
        for (long at = start; at < size; at += r->value_width)
            memcpy(to + at, from + at, (stop - start) * sizeof(float));
    } while (++segment < s->segments && continues(s, segment));
}

static void recur_by_team(const Recurrence *r, const Segments *s) {
    // Columns are independent of one another, so few heads are divided for many threads.
    const long vectors = (r->value_width + 15) / 16, blocks = (vectors + NARROW - 1) / NARROW;
    const long wanted =
        (omp_get_num_threads() + s->segments * r->heads - 1) / (s->segments * r->heads);
    const long parts = wanted < blocks ? wanted : blocks;
    const long share = (blocks + parts - 1) / parts * NARROW * 16;
#pragma omp for schedule(dynamic)
    for (long item = 0; item < s->segments * r->heads * parts; item++) {
        const long segment = item / parts / r->heads, head = item / parts % r->heads;
        const long start = item % parts * share, stop = start + share;
        if (continues(s, segment) || start >= r->value_width) continue;
        follow_slot(r, s, segment, head, start, stop < r->value_width ? stop : r->value_width);
    }
}
