// Kernels for models on x86 processors, compiled with FLOAT32 for AVX-512, with BFLOAT16 for
// AVX512-BF16, with TILES for bfloat16 with AMX, and with AVX2 besides FLOAT32 or BFLOAT16 for
// processors without. Operations on floats are in avx512.h and avx2.h. The type `number`, its loads
// and its rounding are in bfloat16.h and float32.h, its products in the headers named products_.
// The order of sums is in these and in the headers named _tiles and _vectors.
//
// Weights stay in the model's layout, [out, in] row by row, and the next rows' weights are
// prefetched during a product. Each dot product sums in the same order in any batch, so a row's
// result does not depend on the batch.
//
// Products of bfloat16 are exact, sums are in float32. Pointers need no alignment. Arguments are
// checked by the callers in cpu.py and decoder.py.
//
// Functions that end in _by_team are called by all threads of a team with the same arguments, and
// return when all of the work is done. So a team runs several of them after one wake-up.

#include "vectors.h"

#ifdef FLOAT32
#include "float32.h"
#else
#include "bfloat16.h"
#endif
#ifdef TILES
#include "tiles.h"
#endif

#include "linear.h"
// Behind it, since attention uses the products of linear layers.
#include "attention.h"
#include "heads.h"

// --- linear layers -----------------------------------------------------------------------------

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
        Mask mask = first(count - i);
        Floats activated = rounded(activate(load_wide_some(gates + i, mask), kind));
        Floats product = multiply(activated, load_wide_some(ups + i, mask));
        store_narrow_some(gates + i, mask, product);
    }
}

// --- norms and rotary positions ----------------------------------------------------------------

// RMSNorm of one row; x and out may be one. With `shifted` the factor is 1 + weight, in float32
// (Gemma).
INLINE void norm_row(const number *x, const number *weight, number *out, long width, float epsilon,
                     long shifted) {
    Floats squares = zeros();
    for (long i = 0; i < width; i += 16) {
        Floats v = load_wide_some(x + i, first(width - i));
        squares = multiply_add(v, v, squares);
    }
    const float mean = sum_of(squares) / width;
    const Floats factor = spread(1.0f / sqrtf(mean + epsilon));
    for (long i = 0; i < width; i += 16) {
        Mask mask = first(width - i);
        Floats v = multiply(load_wide_some(x + i, mask), factor);
        Floats w = load_wide_some(weight + i, mask);
        if (shifted)
            v = multiply(v, add(w, spread(1.0f)));
        else
            v = multiply(rounded(v), w);
        store_narrow_some(out + i, mask, v);
    }
}

// norm_row for [rows, width], all with the same weights.
void rms_norm(const number *x, const number *weight, number *out, long rows, long width,
              float epsilon, long shifted) {
#pragma omp parallel for if (rows * width > PARALLEL_WORK)
    for (long row = 0; row < rows; row++)
        norm_row(x + row * width, weight, out + row * width, width, epsilon, shifted);
}

// Rotates the first numbers of heads that are `apart`, in place: x * cos + rotate_half(x) * sin.
// cos, sin: [width]. width is a multiple of 32.
INLINE void rotate_row(number *x, const number *cos, const number *sin, long heads, long apart,
                       long width) {
    const long half = width / 2;
    for (long head = 0; head < heads; head++) {
        number *p = x + head * apart;
        for (long i = 0; i < half; i += 16) {
            Floats low = load_wide(p + i), high = load_wide(p + half + i);
            Floats a = rounded(multiply(low, load_wide(cos + i)));
            Floats b = rounded(multiply(high, load_wide(sin + i)));
            Floats d = rounded(multiply(high, load_wide(cos + half + i)));
            Floats e = rounded(multiply(low, load_wide(sin + half + i)));
            store_narrow(p + i, subtract(a, b));
            store_narrow(p + half + i, add(d, e));
        }
    }
}

// rotate_row for the first `heads` heads of rows `stride` apart. cos, sin: [rows, width].
void rotate(number *x, long stride, const number *cos, const number *sin, long rows, long heads,
            long apart, long width) {
#pragma omp parallel for if (rows * heads * width > PARALLEL_WORK)
    for (long row = 0; row < rows; row++)
        rotate_row(x + row * stride, cos + row * width, sin + row * width, heads, apart, width);
}

#ifdef MIXERS
#include "mixers.h"
#endif

// --- attention ---------------------------------------------------------------------------------

// store_row for tokens whose keys and values are their strides apart.
void store(const Attention *a, const number *keys, long key_stride, const number *values,
           long value_stride, const int64_t *slots, long tokens) {
    for (long t = 0; t < tokens; t++)
        store_row(a, keys + t * key_stride, values + t * value_stride, slots[t]);
}

// Attention of rows with one query token each, best with the longest contexts first. queries: rows
// `stride` apart, [heads, key_width] each. out: [rows, heads, value_width]. tables: [rows, blocks].
// contexts: [rows], at least 1.
void decode_attention(const Attention *a, const number *queries, long stride, number *out,
                      long rows, const int64_t *tables, long blocks, const int64_t *contexts) {
    const long work = rows * contexts[0] * a->kv_heads * a->group * a->key_width;
#pragma omp parallel if (work > PARALLEL_WORK)
    decode_attention_by_team(a, queries, stride, out, rows, tables, blocks, contexts);
}

// Each head's rows times its own matrix.
void head_products(const HeadProducts *p, const HeadRows *r, long tokens) {
#pragma omp parallel if (tokens * p->heads * p->inputs * p->outputs > PARALLEL_WORK)
    head_products_by_team(p, r, tokens);
}

// --- decoder layers ----------------------------------------------------------------------------

typedef struct {
    const number *weight;
    float epsilon;
    long shifted;
} Norm;

enum { MOST_SUMMED = 4 };

// One linear layer; or the sum of four over consecutive inputs, (a + b) + (c + d) in float32, of
// products that are rounded to numbers each, and of a bias.
typedef struct {
    const Linear *parts[MOST_SUMMED];
    long count;
    const number *bias;  // [outputs] of four, or NULL
} Sum;

// x += output(attention(projection(norm(x)))), then x += down(gated(norm(x))). Or, with MIXERS, a
// mixer in place of the attention.
typedef struct {
    Norm first, second;
    Norm queries, keys;  // of single heads, before rotation; weight NULL: none
    const Linear *projection, *gated;
    const Sum *output, *down;
    const Attention *attention;
    long gated_heads;   // each query has a gate behind it, for the attention's output
    const void *mixer;  // a DeltaMixer, or NULL
} DecoderLayer;

// Parts of a layer, in their order. With PROFILE the first thread adds up their seconds, which
// benchmarks/profile_step.py reads; without, a mark is nothing.
enum { BEGIN, NORM, PROJECTION, PLACE, MIX, OUTPUT, GATED, DOWN, LAYER_PARTS };

#ifdef PROFILE
double part_seconds[LAYER_PARTS];

static void mark(long part) {
    static double marked;
    if (omp_get_thread_num()) return;
    const double now = omp_get_wtime();
    if (part != BEGIN) part_seconds[part] += now - marked;
    marked = now;
}
#else
INLINE void mark(long part) { (void)part; }
#endif

// Rows of one token each. cos, sin: [positions, rotated], or [rows, rotated] without positions.
// positions: [rows], or NULL. slots: [rows], where keys and values go.
// tables, blocks and contexts are as in decode_attention. read: [num_read], rising: those whose
// result is wanted, at most half of the rows, with their tables and contexts; num_read is rows if
// all are.
typedef struct {
    long rows;
    const number *cos, *sin;
    const int64_t *positions, *slots, *tables;
    long blocks;
    const int64_t *contexts;
    long num_read;
    const int64_t *read, *read_tables, *read_contexts;
    long rotated;          // numbers of a head
    const void *segments;  // Segments of mixers
} Step;

static void norm_by_team(const Norm *norm, const number *x, number *out, long rows, long width) {
#pragma omp for
    for (long row = 0; row < rows; row++)
        norm_row(x + row * width, norm->weight, out + row * width, width, norm->epsilon,
                 norm->shifted);
}

// Queries and their gates, head by head, to all queries and then all gates.
INLINE void part_gates(number *queries, long heads, long width) {
    number gates[heads * width];
    for (long head = 0; head < heads; head++) {
        memcpy(gates + head * width, queries + (2 * head + 1) * width, width * sizeof(number));
        memmove(queries + head * width, queries + 2 * head * width, width * sizeof(number));
    }
    memcpy(queries + heads * width, gates, heads * width * sizeof(number));
}

// Turns the output of `projection` into queries, in place, and keys and values in the cache.
static void place_by_team(const DecoderLayer *l, const Step *step, number *projected, long stride) {
    const Attention *a = l->attention;
    const long width = a->key_width, heads = a->kv_heads * a->group;
#pragma omp for
    for (long row = 0; row < step->rows; row++) {
        number *query = projected + row * stride;
        number *key = query + (l->gated_heads ? 2 : 1) * heads * width;
        if (l->gated_heads) part_gates(query, heads, width);
        for (long head = 0; head < heads && l->queries.weight; head++)
            norm_row(query + head * width, l->queries.weight, query + head * width, width,
                     l->queries.epsilon, l->queries.shifted);
        for (long head = 0; head < a->kv_heads && l->keys.weight; head++)
            norm_row(key + head * width, l->keys.weight, key + head * width, width, l->keys.epsilon,
                     l->keys.shifted);
        const long turn = (step->positions ? step->positions[row] : row) * step->rotated;
        const number *cos = step->cos + turn, *sin = step->sin + turn;
        rotate_row(query, cos, sin, heads, width, step->rotated);
        rotate_row(key, cos, sin, a->kv_heads, width, step->rotated);
        store_row(a, key, key + a->kv_heads * width, step->slots[row]);
    }
}

// Moves the read rows to the front: what is computed of them in place, x to `kept`.
static void keep_by_team(const Step *step, number *computed, long stride, const number *x,
                         number *kept, long hidden) {
#pragma omp single
    for (long i = 0; i < step->num_read; i++) {
        const long row = step->read[i];
        memmove(computed + i * stride, computed + row * stride, stride * sizeof(number));
        memcpy(kept + i * hidden, x + row * hidden, hidden * sizeof(number));
    }
}

// Multiplies the attention's output by gates, which are behind the queries.
static void gate_by_team(const Attention *a, const number *queries, long stride, long rows,
                         number *attended) {
    const long width = a->kv_heads * a->group * a->value_width;
#pragma omp for
    for (long row = 0; row < rows; row++) {
        const number *gates = queries + row * stride + width;
        number *x = attended + row * width;
        for (long i = 0; i < width; i += 16) {
            const Mask mask = first(width - i);
            const Floats gate = rounded(activate(load_wide_some(gates + i, mask), GATED_SIGMOID));
            store_narrow_some(x + i, mask, multiply(gate, load_wide_some(x + i, mask)));
        }
    }
}

// out += sum(x). memory: per row, the inputs and four times the outputs, if there are four parts.
static void add_sum_by_team(const Sum *sum, const number *x, long rows, number *out,
                            number *memory) {
    if (sum->count == 1) {
        linear_by_team(sum->parts[0], x, rows, out, out);
        return;
    }
    const long k = sum->parts[0]->inputs, width = row_width(sum->parts[0]);
    number *pieces = memory, *products = pieces + MOST_SUMMED * rows * k;
#pragma omp for
    for (long row = 0; row < rows; row++)
        for (long part = 0; part < MOST_SUMMED; part++)
            memcpy(pieces + (part * rows + row) * k, x + (row * MOST_SUMMED + part) * k,
                   k * sizeof(number));
    for (long part = 0; part < MOST_SUMMED; part++)
        linear_by_team(sum->parts[part], pieces + part * rows * k, rows, NULL,
                       products + part * rows * width);
#pragma omp for
    for (long row = 0; row < rows; row++) {
        number *const target = out + row * width;
        for (long i = 0; i < width; i += 16) {
            const Mask mask = first(width - i);
            Floats p[MOST_SUMMED];
            for (long part = 0; part < MOST_SUMMED; part++)
                p[part] = load_wide_some(products + (part * rows + row) * width + i, mask);
            Floats total = add(add(p[0], p[1]), add(p[2], p[3]));
            if (sum->bias) total = add(total, load_wide_some(sum->bias + i, mask));
            store_narrow_some(target + i, mask,
                              add(load_wide_some(target + i, mask), rounded(total)));
        }
    }
}

// Runs x, [rows, hidden], through consecutive layers, in place. In the last layer, unread rows only
// store keys and values. memory: per row, the outputs of the widest layer's projection and gated,
// the inputs of its output and down, hidden, and what add_sum_by_team and mix_by_team need.
void decoder_layers(const DecoderLayer *layers, long count, const Step *step, number *x,
                    number *memory) {
    const long rows = step->rows;
    const Linear *largest = layers->gated;
#pragma omp parallel if (rows * largest->inputs * row_width(largest) > PARALLEL_WORK)
    for (const DecoderLayer *l = layers; l < layers + count; l++) {
        const long hidden = l->projection->inputs, stride = row_width(l->projection);
        number *normed = memory, *projected = normed + rows * hidden;
        const long inputs = l->output->count * l->output->parts[0]->inputs;
        number *attended = projected + rows * stride, *gated = attended + rows * inputs;
        number *summed = gated + rows * row_width(l->gated);
        mark(BEGIN);
        norm_by_team(&l->first, x, normed, rows, hidden);
        mark(NORM);
        linear_by_team(l->projection, normed, rows, NULL, projected);
        mark(PROJECTION);
        const int some = step->num_read < rows && l == layers + count - 1;
        const long left = some ? step->num_read : rows;
        number *kept = x;
        if (some) kept = normed, normed += left * hidden;
#ifdef MIXERS
        if (l->mixer) {
            mix_by_team(l->mixer, projected, stride, rows, attended, summed, step->segments);
            if (some) keep_by_team(step, attended, inputs, x, kept, hidden);
        } else
#endif
        {
            place_by_team(l, step, projected, stride);
            if (some) keep_by_team(step, projected, stride, x, kept, hidden);
            mark(PLACE);
            decode_attention_by_team(l->attention, projected, stride, attended, left,
                                     some ? step->read_tables : step->tables, step->blocks,
                                     some ? step->read_contexts : step->contexts);
            if (l->gated_heads) gate_by_team(l->attention, projected, stride, left, attended);
        }
        mark(MIX);
        add_sum_by_team(l->output, attended, left, kept, summed);
        mark(OUTPUT);
        norm_by_team(&l->second, kept, normed, left, hidden);
        mark(NORM);
        linear_by_team(l->gated, normed, left, NULL, gated);
        mark(GATED);
        add_sum_by_team(l->down, gated, left, kept, summed);
        mark(DOWN);
        if (some)
#pragma omp for
            for (long i = 0; i < left; i++)
                memcpy(x + step->read[i] * hidden, kept + i * hidden, hidden * sizeof(number));
    }
}
