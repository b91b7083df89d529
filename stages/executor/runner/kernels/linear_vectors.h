// Linear layers by dot products of vectors, 16 of them summed across lanes together.

#ifdef AVX2
#define MOST_ROWS 3  // of a tile of four columns, whose sums stay in registers
#else
#define MOST_ROWS 6
#endif

enum {
    BLOCK_BYTES = 512 << 10,  // see block_of
    IN_ORDER = MOST_ROWS > 3,
};

// Rows of weights: the model's, or operands made of them.
typedef struct {
    const number *rows;
    int are_operands;
} Weights;

INLINE Weights weights_from(Weights w, long i) {
    if (w.are_operands) i *= sizeof(Operand) / sizeof(number);
    return (Weights){w.rows + i, w.are_operands};
}

INLINE Numbers load_weights(Weights w, long offset, int part, Lanes mask) {
    if (w.are_operands) return load_operands((const Operand *)w.rows + offset, part, mask);
    return load((const number *)w.rows + offset, part, mask);
}

// A step of dot_products: a vector's products of each pair of rows, or fewer by the mask.
INLINE void add_products(int rows, int columns, const Operand *x, Weights weights, long k,
                         Lanes mask, Sums *sums) {
    UNROLL
    for (int part = 0; part < PARTS; part++) {
#ifdef AVX2
        // With 12 sums, there are registers for three rows and one weight.
        Numbers values[MOST_ROWS];
        UNROLL
        for (int a = 0; a < rows; a++) values[a] = held(load_operands(x + a * k, part, mask));
        UNROLL
        for (int b = 0; b < columns; b++) {
            const Numbers weight = held(load_weights(weights, b * k, part, mask));
            UNROLL
            for (int a = 0; a < rows; a++)
                sums[a * columns + b] = add_product(sums[a * columns + b], values[a], weight);
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
INLINE Products dot_products(int rows, int columns, const Operand *x, Weights weights, long k,
                             const number *ahead, long lines) {
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

// Likewise for few rows, bound by memory: weights are read in memory order.
INLINE Products dot_products_in_order(int rows, int columns, const Operand *x, const number *weight,
                                      long k) {
    Sums sums[16];
    UNROLL
    for (int i = 0; i < 16; i++) sums[i] = no_sums();
    UNROLL
    for (int b = 0; b < columns; b++) {
        const Weights row = {weight + b * k, 0};
        Sums of_row[4];
        UNROLL
        for (int a = 0; a < rows; a++) of_row[a] = no_sums();
        long i = 0;
        for (; i + WIDTH <= k; i += WIDTH) {
            add_products(rows, 1, x + i, weights_from(row, i), k, ALL_LANES, of_row);
            _mm_prefetch((const char *)(weight + b * k + i) + 2048, _MM_HINT_T1);
        }
        if (i < k) add_products(rows, 1, x + i, weights_from(row, i), k, lanes(k - i), of_row);
        UNROLL
        for (int a = 0; a < rows; a++) sums[a * columns + b] = of_row[a];
    }
    return sum_tile(sums, rows * columns);
}

// Computes and stores outputs from up to 16 products; gated kinds with `ups`.
INLINE void put_products(int rows, int columns, const Linear *l, long part, Floats products,
                         Floats ups, Target to, long column) {
    if (l->bias[part]) {
        float bias[16] = {0};
        UNROLL
        for (int i = 0; i < rows * columns; i++)
            bias[i] = wide(l->bias[part][column + i % columns]);
        products = add(products, load_floats(bias));
    }
    if (l->kind >= GATED_SILU)
        products = multiply(rounded(activate(rounded(products), l->kind)), rounded(ups));
    if (to.added) {
        number added[16] = {0};
        UNROLL
        for (int a = 0; a < rows; a++)
            memcpy(added + a * columns, to.added + a * to.stride + column,
                   columns * sizeof(number));
        products = add(rounded(products), load_wide(added));
    }
    if (l->kind == WIDE) {
        float result[16];
        store_floats(result, rounded(products));
        UNROLL
        for (int a = 0; a < rows; a++)
            memcpy((float *)to.out + a * to.stride + column, result + a * columns,
                   columns * sizeof(float));
    } else {
        number result[16];
        store_narrow(result, products);
        UNROLL
        for (int a = 0; a < rows; a++)
            memcpy((number *)to.out + a * to.stride + column, result + a * columns,
                   columns * sizeof(number));
    }
}

// One tile of outputs: `rows` rows, and `columns` weights from `column` on. With `in_order` as in
// dot_products_in_order; if `widened`, with laid_out as in multiply_block, from that column on.
INLINE void multiply_tile(int rows, int columns, const Linear *l, long part, const Operand *x,
                          Target to, long column, int in_order, int widened,
                          const Operand *laid_out, const number *ahead, long lines) {
    const long k = l->inputs;
    const number *weight = l->weight[part] + column * k;
    const Weights weights = widened ? (Weights){(const number *)laid_out, 1} : (Weights){weight, 0};
    const Products products = in_order ? dot_products_in_order(rows, columns, x, weight, k)
                                       : dot_products(rows, columns, x, weights, k, ahead, lines);
    Products ups = products;
    if (l->kind >= GATED_SILU) {
        const number *other = l->weight[1] + column * k;
        const number *other_ahead = ahead ? other + (ahead - weight) : NULL;
        const Weights others =
            widened ? (Weights){(const number *)(laid_out + 4 * k), 1} : (Weights){other, 0};
        ups = in_order ? dot_products_in_order(rows, columns, x, other, k)
                       : dot_products(rows, columns, x, others, k, other_ahead, lines);
    }
    const int held = rows * columns > 16 ? 16 / columns : rows;
    put_products(held, columns, l, part, products.of[0], ups.of[0], to, column);
    if (held < rows)
        put_products(rows - held, columns, l, part, products.of[1], ups.of[1],
                     at_row(to, held, output_width(l)), column);
}

// Outputs `start` to `stop` of some rows, in tiles of so many columns and the rest one by one.
INLINE void multiply_rows(int rows, int columns, const Linear *l, long part, const Operand *x,
                          Target to, long start, long stop, int in_order, int widened,
                          const Operand *laid_out, const number *ahead, long lines) {
    const long k = l->inputs;
    long column = start;
    for (; column + columns <= stop; column += columns)
        multiply_tile(rows, columns, l, part, x, to, column, in_order, widened,
                      laid_out + (column - start) * k, ahead, lines);
    for (; column < stop; column++)
        multiply_tile(rows, 1, l, part, x, to, column, 0, widened, laid_out + (column - start) * k,
                      NULL, 0);
}

// Likewise, of as many rows as a tile has: MOST_ROWS, which use each weight for more products, or
// up to four.
INLINE void multiply_some(const Linear *l, long part, const Operand *x, Target to, long rows,
                          long start, long stop, int widened, const Operand *laid_out,
                          const number *ahead, long lines) {
#define MULTIPLY(rows) \
    multiply_rows(rows, 4, l, part, x, to, start, stop, 0, widened, laid_out, ahead, lines)
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

// The same, of any number of rows. If these have other operands than numbers, weights that enough
// rows use are made operands too, in `laid_out`: four rows of each part that is multiplied.
static void multiply_block(const Linear *l, long part, const Operand *x, Target to, long rows,
                           long start, long stop, Operand *laid_out) {
    const long k = l->inputs, width = output_width(l);
    // While four columns are multiplied with all rows, the next four are prefetched evenly: a burst
    // would stall.
    const long tiles = (rows + MOST_ROWS - 1) / MOST_ROWS, lines = (4 + tiles - 1) / tiles;
    const long share = k / WIDTH * WIDTH * lines;
    const int widened = WIDENED && rows >= 3 * MOST_ROWS;
    for (long column = start; column < stop; column += 4) {
        const long until = column + 4 < stop ? column + 4 : stop;
        const number *next = l->weight[part] + (column + 4) * k;
        for (long i = 0; i < until - column && widened; i++) {
            lay_out_operands(next + (i - 4) * k, k, laid_out + i * k);
            if (l->kind >= GATED_SILU)
                lay_out_operands(l->weight[1] + (column + i) * k, k, laid_out + (4 + i) * k);
        }
        for (long row = 0, done = 0, some; row < rows; row += some, done += share) {
            const int more = done < 4 * k;
            const number *ahead = more ? next + done : NULL;
            const Operand *operands = x + row * k;
            const Target here = at_row(to, row, width);
            some = tile_rows(rows - row);
            if (widened)
                multiply_some(l, part, operands, here, some, column, until, 1, laid_out, ahead,
                              more ? lines : 0);
            else
                multiply_some(l, part, operands, here, some, column, until, 0, NULL, ahead,
                              more ? lines : 0);
        }
    }
}

static void linear_by_team(const Linear *l, const number *x, long rows, const number *added,
                           void *out) {
    const long k = l->inputs, width = output_width(l);
    const Chunks chunks = chunks_of(l, 16);
    const long block = block_of(l, rows, BLOCK_BYTES, 66, MOST_ROWS),
               blocks = (rows + block - 1) / block;
#pragma omp for schedule(dynamic)
    for (long item = 0; item < blocks * chunks.count; item++) {
        const long from = item / chunks.count * block;
        const long some = from + block < rows ? block : rows - from;
        Operand *laid_out = NULL;
        const Operand *operands = operands_of(x + from * k, some, k, &laid_out);
        for (long part = 0; part < output_parts(l); part++) {
            const Outputs o = outputs_of(l, &chunks, item % chunks.count, part);
            const Target to = target_of(l, out, added, o.offset);
            if (IN_ORDER && rows == 1)
                multiply_rows(1, 16, l, part, operands, to, o.start, o.stop, 1, 0, NULL, NULL, 0);
            else if (IN_ORDER && rows == 2)
                multiply_rows(2, 8, l, part, operands, to, o.start, o.stop, 1, 0, NULL, NULL, 0);
            else
                multiply_block(l, part, operands, at_row(to, from, width), some, o.start, o.stop,
                               laid_out);
        }
    }
}
