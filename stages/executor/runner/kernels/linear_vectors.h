// Linear layers by dot products of vectors, 16 of them summed across lanes together.

#ifdef AVX2
#define MOST_ROWS 3  // of a tile of four columns, whose sums stay in registers
#else
#define MOST_ROWS 6
#endif

enum {
    BLOCK_BYTES = 512 << 10,  // see block_of
    MOST_IN_BLOCK = 1024,     // rows, since their products are on the stack
    AHEAD = 8,                // outputs further, weights are prefetched
    LONG = 2048,  // inputs of weights that the processor fetches early enough for one or two rows
    IN_ORDER = MOST_ROWS > 3,  // for one or two rows
};

// Rows of weights: the model's numbers, or operands made of them. ups: those of a gated kind's
// other part.
typedef struct {
    const number *rows, *ups;
    int are_operands;
} Weights;

// The same from number `i` on.
INLINE Weights weights_from(Weights w, long i) {
    if (w.are_operands) i *= sizeof(Operand) / sizeof(number);
    return (Weights){w.rows + i, w.ups ? w.ups + i : NULL, w.are_operands};
}

INLINE Weights ups_of(Weights w) { return (Weights){w.ups, NULL, w.are_operands}; }

INLINE Numbers load_weights(Weights w, long offset, int part, Lanes mask) {
    if (w.are_operands) return load_operands((const Operand *)w.rows + offset, part, mask);
    return load(w.rows + offset, part, mask);
}

// A step of dot_products: a vector's products of each pair of rows, or fewer by the mask.
INLINE void add_products(int rows, int columns, const Operand *x, Weights weights, long k,
                         Lanes mask, Sums *sums) {
    UNROLL
    for (int part = 0; part < PARTS; part++) {
#ifdef AVX2
        // Beside 12 sums, there are registers for two rows and one weight.
        const int third = rows > 2 && mask == ALL_LANES, kept = third ? 2 : rows;
        Numbers values[MOST_ROWS];
        UNROLL
        for (int a = 0; a < kept; a++) values[a] = held(load_operands(x + a * k, part, mask));
        UNROLL
        for (int b = 0; b < columns; b++) {
            const Numbers weight = held(load_weights(weights, b * k, part, mask));
            UNROLL
            for (int a = 0; a < kept; a++)
                sums[a * columns + b] = add_product(sums[a * columns + b], values[a], weight);
            if (third) {
                Sums *const last = sums + 2 * columns + b;
                *last = add_product_from(*last, weight, x + 2 * k, part);
            }
        }
#else
        Numbers loaded[16];
        UNROLL
        for (int b = 0; b < columns; b++) loaded[b] = load_weights(weights, b * k, part, mask);
        UNROLL
        for (int a = 0; a < rows; a++) {
            const Numbers values = load_operands(x + a * k, part, mask);
            UNROLL
            for (int b = 0; b < columns; b++)
                sums[a * columns + b] = add_product(sums[a * columns + b], values, loaded[b]);
        }
#endif
    }
}

// The products of a tile, 6 by 4 at most: in lane a * columns + b of both vectors, that of rows a
// and b.
typedef struct {
    Floats of[2];
} Products;

INLINE Products sum_tile(const Sums *sums, int count) {
    Products products = {{sum_lanes(sums, count), zeros()}};
    if (count > 16) products.of[1] = sum_lanes(sums + 16, count - 16);
    return products;
}

// Dot products of `rows` rows of x with `columns` rows of weights. Each step prefetches `lines`
// cache lines from `ahead` on.
INLINE Products dot_products_inline(int rows, int columns, const Operand *x, Weights weights,
                                    long k, const number *ahead, long lines) {
    Sums sums[32];
    UNROLL
    for (int i = 0; i < 32; i++) sums[i] = no_sums();
    long i = 0;
    if (lines)
        for (; i + WIDTH <= k; i += WIDTH) {
            add_products(rows, columns, x + i, weights_from(weights, i), k, ALL_LANES, sums);
            for (long line = 0; line < lines; line++, ahead += WIDTH)
                _mm_prefetch((const char *)ahead, _MM_HINT_T1);
        }
    // A separate loop, since even the test for lines takes time.
    for (; i + WIDTH <= k; i += WIDTH)
        add_products(rows, columns, x + i, weights_from(weights, i), k, ALL_LANES, sums);
    if (i < k) add_products(rows, columns, x + i, weights_from(weights, i), k, lanes(k - i), sums);
    return sum_tile(sums, rows * columns);
}

#ifdef AVX2
// The largest tile, of operands. Not inlined: alone, it fits the 16 registers.
static __attribute__((noinline)) Products largest_tile(const Operand *x, const Operand *weights,
                                                       long k, const number *ahead, long lines) {
    const Weights operands = {(const number *)weights, NULL, 1};
    return dot_products_inline(MOST_ROWS, 4, x, operands, k, ahead, lines);
}
#endif

INLINE Products dot_products(int rows, int columns, const Operand *x, Weights weights, long k,
                             const number *ahead, long lines) {
#ifdef AVX2
    if (rows == MOST_ROWS && columns == 4 && (weights.are_operands || !WIDENED))
        return largest_tile(x, (const Operand *)weights.rows, k, ahead, lines);
#endif
    return dot_products_inline(rows, columns, x, weights, k, ahead, lines);
}

// Likewise for few rows, bound by memory: weights are read in memory order.
INLINE Products dot_products_in_order(int rows, int columns, const Operand *x, Weights weights,
                                      long k) {
    Sums sums[16];
    UNROLL
    for (int i = 0; i < 16; i++) sums[i] = no_sums();
    UNROLL
    for (int b = 0; b < columns; b++) {
        const Weights row = weights_from(weights, b * k);
        Sums of_row[4];
        UNROLL
        for (int a = 0; a < rows; a++) of_row[a] = no_sums();
        long i = 0;
        for (; i + WIDTH <= k; i += WIDTH) {
            add_products(rows, 1, x + i, weights_from(row, i), k, ALL_LANES, of_row);
            _mm_prefetch((const char *)(row.rows + i) + 2048, _MM_HINT_T1);
        }
        if (i < k) add_products(rows, 1, x + i, weights_from(row, i), k, lanes(k - i), of_row);
        UNROLL
        for (int a = 0; a < rows; a++) sums[a * columns + b] = of_row[a];
    }
    return sum_tile(sums, rows * columns);
}

// Stores a tile's products, rows of `to` 16 apart.
INLINE void keep_products(int rows, int columns, Products products, float *to) {
    float lanes[32];
    store_floats(lanes, products.of[0]);
    if (rows * columns > 16) store_floats(lanes + 16, products.of[1]);
    UNROLL
    for (int a = 0; a < rows; a++)
        memcpy(to + a * 16, lanes + a * columns, columns * sizeof(float));
}

// One tile of products: `rows` rows, and the `columns` columns where `weights` begin; those of a
// gated kind's other part to `ups`. With `in_order` as in dot_products_in_order.
INLINE void multiply_tile(int rows, int columns, const Linear *l, const Operand *x, Weights weights,
                          float *to, float *ups, int in_order, const number *ahead, long lines) {
    const long k = l->inputs;
    const Products products = in_order ? dot_products_in_order(rows, columns, x, weights, k)
                                       : dot_products(rows, columns, x, weights, k, ahead, lines);
    keep_products(rows, columns, products, to);
    if (l->kind >= GATED_SILU) {
        const Weights others = ups_of(weights);
        const number *next = ahead ? l->weight[1] + (ahead - l->weight[0]) : NULL;
        keep_products(rows, columns,
                      in_order ? dot_products_in_order(rows, columns, x, others, k)
                               : dot_products(rows, columns, x, others, k, next, lines),
                      ups);
    }
}

// Products with `count` rows of weights, at most 16, in tiles of so many columns and the rest one
// by one.
INLINE void multiply_rows(int rows, int columns, const Linear *l, const Operand *x, Weights weights,
                          long count, float *to, float *ups, int in_order, const number *ahead,
                          long lines) {
    const long k = l->inputs;
    long column = 0;
    for (; column + columns <= count; column += columns)
        multiply_tile(rows, columns, l, x, weights_from(weights, column * k), to + column,
                      ups + column, in_order, ahead, lines);
    for (; column < count; column++)
        multiply_tile(rows, 1, l, x, weights_from(weights, column * k), to + column, ups + column,
                      0, NULL, 0);
}

// Likewise, of as many rows as a tile has: MOST_ROWS, which use each weight for more products, or
// up to four.
INLINE void multiply_some(const Linear *l, const Operand *x, Weights weights, long rows, long count,
                          float *to, float *ups, const number *ahead, long lines) {
#define MULTIPLY(rows) multiply_rows(rows, 4, l, x, weights, count, to, ups, 0, ahead, lines)
    switch (rows) {
    case 1: MULTIPLY(1); break;
    case 2: MULTIPLY(2); break;
#if MOST_ROWS > 3
    case 3: MULTIPLY(3); break;
    case 4: MULTIPLY(4); break;
#endif
    default: MULTIPLY(MOST_ROWS); break;
    }
#undef MULTIPLY
}

// The rows of the next tile, given the rows left.
INLINE long tile_rows(long left) {
    if (left == MOST_ROWS || left >= 2 * MOST_ROWS) return MOST_ROWS;
    if (MOST_ROWS < 4) return left > MOST_ROWS + 1 ? MOST_ROWS : left < 2 ? left : 2;
    return left < 4 ? left : 4;
}

// The model's weights of outputs from `column` on.
INLINE Weights weights_of(const Linear *l, long part, long column) {
    const long at = column * l->inputs;
    return (Weights){l->weight[part] + at, l->kind >= GATED_SILU ? l->weight[1] + at : NULL, 0};
}

// Makes operands of up to four rows of weights, and of their ups, in `room`.
static Weights widened(const Linear *l, Weights weights, long columns, Operand *room) {
    const long k = l->inputs;
    for (long i = 0; i < columns; i++) {
        lay_out_operands(weights.rows + i * k, k, room + i * k);
        if (weights.ups) lay_out_operands(weights.ups + i * k, k, room + (4 + i) * k);
    }
    return (Weights){(const number *)room, (const number *)(room + 4 * k), 1};
}

// Products of any number of rows with up to four rows of weights, from output `column` on. Weights
// of four outputs from `later` on are prefetched. room: for eight rows of weights as operands,
// which are made if enough rows of x use them.
INLINE void multiply_columns(const Linear *l, long part, const Operand *x, long rows, long column,
                             long count, float *to, float *ups, long later, Operand *room) {
    const long k = l->inputs;
    // While four columns are multiplied with all rows, four others are prefetched evenly: a burst
    // would stall. Of three tiles, smaller ones prefetch one line a step, for which they suffice.
    const long tiles = (rows + MOST_ROWS - 1) / MOST_ROWS, lines = (4 + tiles - 1) / tiles;
    const long share = k / WIDTH * WIDTH;
    const int ahead_helps = rows > 2 || k < LONG, many = WIDENED && rows >= 3 * MOST_ROWS;
    const number *next = l->weight[part] + later * k;
    Weights weights = weights_of(l, part, column);
    if (many) weights = widened(l, weights, count, room);
    for (long row = 0, done = 0, some; row < rows; row += some) {
        const int more = done < 4 * k && ahead_helps;
        const number *ahead = more ? next + done : NULL;
        some = tile_rows(rows - row);
        const long here_lines = tiles == 3 && some < MOST_ROWS ? 1 : lines;
        const long given = more ? here_lines : 0;
        float *here = to + row * 16, *ups_here = ups + row * 16;
        // Constants, so that the loops are compiled for each kind of weights.
        weights.are_operands = 0;
        const Weights operands = {weights.rows, weights.ups, 1};
        if (many)
            multiply_some(l, x + row * k, operands, some, count, here, ups_here, ahead, given);
        else
            multiply_some(l, x + row * k, weights, some, count, here, ups_here, ahead, given);
        done += share * here_lines;
    }
}

// Outputs `start` to `stop` of some rows. The thread's likely next chunk begins `jump` behind them.
// 16 columns of all rows are multiplied before they become outputs: right behind each tile, the
// next one's products would wait for activations.
static void multiply_block(const Linear *l, long part, const Operand *x, Target to, long rows,
                           long start, long stop, long jump, Operand *room) {
    const long width = output_width(l), gated = l->kind >= GATED_SILU;
    float products[rows * 16], ups[gated ? rows * 16 : 16];
    for (long column = start; column < stop; column += 16) {
        const long count = stop - column < 16 ? stop - column : 16;
        const Weights weights = weights_of(l, part, column);
        if (IN_ORDER && rows == 1)
            multiply_rows(1, 16, l, x, weights, count, products, ups, 1, NULL, 0);
        else if (IN_ORDER && rows == 2)
            multiply_rows(2, 8, l, x, weights, count, products, ups, 1, NULL, 0);
        else
            for (long i = 0; i < count; i += 4) {
                const long four = column + i, later = four + AHEAD;
                multiply_columns(l, part, x, rows, four, count - i < 4 ? count - i : 4,
                                 products + i, ups + i, later < stop ? later : later + jump, room);
            }
        for (long row = 0; row < rows; row++)
            put_outputs(l, part, load_floats(products + row * 16),
                        load_floats(gated ? ups + row * 16 : ups), at_row(to, row, width), column,
                        first(count));
    }
}

static void dense_by_team(const Linear *l, const number *x, long rows, const number *added,
                          void *out) {
    const long k = l->inputs, width = output_width(l);
    const Chunks chunks = chunks_of(l, 16);
    const long row_bytes = sizeof(number) * k, most = MOST_IN_BLOCK * row_bytes;
    const long block = block_of(l, rows, BLOCK_BYTES < most ? BLOCK_BYTES : most, 66, MOST_ROWS),
               blocks = (rows + block - 1) / block;
#pragma omp for schedule(dynamic)
    for (long item = 0; item < blocks * chunks.count; item++) {
        const long from = item / chunks.count * block;
        const long some = from + block < rows ? block : rows - from;
        Operand *room = NULL;
        const Operand *operands = operands_of(x + from * k, some, k, &room);
        for (long part = 0; part < output_parts(l); part++) {
            const Outputs o = outputs_of(l, &chunks, item % chunks.count, part);
            const Target to = target_of(l, out, added, o.offset);
            multiply_block(l, part, operands, at_row(to, from, width), some, o.start, o.stop,
                           (omp_get_num_threads() - 1) * chunks.size, room);
        }
    }
}
