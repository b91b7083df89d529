// Linear layers, and the distribution of their work over threads.

enum { PLAIN, WIDE, GATED_SILU, GATED_TANH_GELU, GATED_SIGMOID };

typedef struct Codes Codes;

// One or more linear layers over the same rows, their outputs side by side. The gated kinds have
// two parts, gate and up, without bias, and one output, act(gate) * up. WIDE writes floats,
// rounded to numbers.
typedef struct {
    const number *weight[4];  // [outputs, inputs]
    const number *bias[4];    // [outputs], or NULL
    long outputs[4];
    long parts;
    long inputs;
    long kind;
    const Codes *codes[4];  // in place of all weights, or NULL
} Linear;

INLINE Floats activate(Floats x, long kind) {
    Floats one = spread(1.0f);
    if (kind == GATED_SILU || kind == GATED_SIGMOID) {
        Floats e = exponential(subtract(zeros(), x));
        return divide(kind == GATED_SILU ? x : one, add(one, e));
    }
    Floats cube = multiply(multiply(x, x), x);
    Floats inner = multiply_add(cube, spread(0.044715f), x);
    Floats t = hyperbolic_tangent(multiply(inner, spread(0.7978845608028654f)));
    return multiply(multiply(x, spread(0.5f)), add(one, t));
}

// The place of a part's outputs: rows `stride` numbers apart. `added`, if not NULL, has numbers to
// add at the same places.
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

enum { CHUNK_BYTES = 320 << 10 };  // of weights, about

// The outputs of one thread's chunk: large enough to stream from memory, small enough for threads
// to end together, and about the same number for each thread.
typedef struct {
    long size, count;
} Chunks;

INLINE Chunks chunks_for(long outputs, long bytes, long tile) {
    const long threads = omp_get_num_threads();
    const long turns = (outputs * bytes + threads * CHUNK_BYTES / 2) / (threads * CHUNK_BYTES);
    const long count = larger(turns, 1) * threads;
    const long size = larger((outputs + count * tile - 1) / (count * tile), 1) * tile;
    return (Chunks){size, (outputs + size - 1) / size};
}

INLINE Chunks chunks_of(const Linear *l, long tile) {
    const long bytes = sizeof(number) * l->inputs * (l->kind >= GATED_SILU ? 2 : 1);
    return chunks_for(row_width(l), bytes, tile);
}

// The outputs of a part in a chunk, and the part's offset in the row.
typedef struct {
    long start, stop, offset;
} Outputs;

// Those of a part, perhaps none.
INLINE Outputs outputs_of(const Linear *l, const Chunks *c, long place, long part) {
    long offset = 0;
    for (long i = 0; i < part; i++) offset += l->outputs[i];
    const long start = place * c->size - offset, stop = start + c->size;
    return (Outputs){larger(start, 0), stop < l->outputs[part] ? stop : l->outputs[part], offset};
}

// Rows per pass over the weights, so that the rows stay in the second-level cache: rows of `bytes`
// of inputs, at least `least`. Blocks have about equal sizes, multiples of `tile`.
INLINE long block_of(const Linear *l, long rows, long bytes, long least, long tile) {
    const long most = larger(bytes / (sizeof(number) * l->inputs), least);
    const long blocks = larger((rows + most - 1) / most, 1);
    return larger((rows + blocks - 1) / blocks + tile - 1, tile) / tile * tile;
}

// Computes and stores 16 outputs of a row from their products, or fewer by the mask; gated kinds
// with `ups`.
INLINE void put_outputs(const Linear *l, long part, Floats products, Floats ups, Target to,
                        long column, Mask mask) {
    if (l->bias[part]) products = add(products, load_wide_some(l->bias[part] + column, mask));
    if (l->kind >= GATED_SILU)
        products = multiply(rounded(activate(rounded(products), l->kind)), rounded(ups));
    if (to.added) products = add(rounded(products), load_wide_some(to.added + column, mask));
    if (l->kind == WIDE)
        store_floats_some((float *)to.out + column, mask, rounded(products));
    else
        store_narrow_some((number *)to.out + column, mask, products);
}

#include "codes.h"
#ifdef TILES
#include "linear_tiles.h"
#else
#include "linear_vectors.h"
#endif

static void linear_by_team(const Linear *l, const number *x, long rows, const number *added,
                           void *out) {
    if (l->codes[0])
        codes_by_team(l, x, rows, added, out);
    else
        dense_by_team(l, x, rows, added, out);
}
