// Products of each head's rows with a matrix of its own, as in multi-head latent attention. A row's
// sums have the same order in any batch.

// Matrices of all heads: [inputs, outputs] each, or [outputs, inputs] if `across`.
typedef struct {
    const number *matrices;
    long head_stride;  // from one head's matrix to the next
    long heads, inputs, outputs, across;
} HeadProducts;

// Rows by strides of tokens and heads. x: [tokens, heads, inputs]. out: [tokens, heads, outputs].
typedef struct {
    const number *x;
    number *out;
    long x_token, x_head, out_token, out_head;
} HeadRows;

enum {
    BLOCK_TOKENS = 64,  // that share what is made of a matrix
#ifdef AVX2
    ADDED_TOGETHER = 3,  // rows, with the registers that there are
    MULTIPLIED_TOGETHER = 2,
#else
    ADDED_TOGETHER = 4,
    MULTIPLIED_TOGETHER = 4,
#endif
};

// Rows of x times [inputs, outputs], 32 outputs at a time: weighted sums of the matrix's rows.
static void multiply_along(const HeadProducts *p, const number *matrix, const number *x,
                           long x_stride, number *out, long out_stride, long tokens) {
    const long inputs = (p->inputs + 15) / 16 * 16;  // the last ones are zeros
    Operand weights[tokens * inputs], laid_out[inputs * 32];
    for (long t = 0; t < tokens; t++)
        for (long i = 0; i < inputs; i += 16) {
            const Floats some = load_wide_some(x + t * x_stride + i, first(p->inputs - i));
            store_operands(weights + t * inputs + i, some);
        }
    // Parts of rows defeat hardware prefetching.
    for (long i = 0; i < p->inputs * p->outputs; i += WIDTH)
        _mm_prefetch((const char *)(matrix + i), _MM_HINT_T1);
    for (long column = 0; column < p->outputs; column += 32) {
        const long left = p->outputs - column;
        for (long i = 0; i < inputs; i += 16) {
            const number *rows[16];
            for (long j = 0; j < 16; j++) {
                const long row = i + j < p->inputs ? i + j : p->inputs - 1;  // any valid one
                rows[j] = matrix + row * p->outputs;
            }
            lay_out_values(rows, column, left, laid_out + i * 32);
        }
        for (long t = 0, some; t < tokens; t += some) {
            float sums[ADDED_TOGETHER * 32] = {0};
            const Operand *those = weights + t * inputs;
            some = tokens - t < ADDED_TOGETHER ? tokens - t : ADDED_TOGETHER;
            switch (some) {
            case 1: add_values(1, 2, sums, 32, those, inputs, laid_out, 0, inputs, 0); break;
            case 2: add_values(2, 2, sums, 32, those, inputs, laid_out, 0, inputs, 0); break;
            case 3: add_values(3, 2, sums, 32, those, inputs, laid_out, 0, inputs, 0); break;
            default:
                add_values(ADDED_TOGETHER, 2, sums, 32, those, inputs, laid_out, 0, inputs, 0);
                break;
            }
            for (long a = 0; a < some; a++) {
                Floats low = load_floats(sums + a * 32), high = load_floats(sums + a * 32 + 16);
                number *to = out + (t + a) * out_stride + column;
                put_in_order(&low, &high);
                store_narrow_some(to, first(left), low);
                store_narrow_some(to + 16, first(left - 16), high);
            }
        }
    }
}

// Dot products of some rows of x, operands, with some rows of a matrix: row by row.
INLINE void put_dots(int rows, int columns, const Operand *x, const number *matrix, long k,
                     number *out, long out_stride) {
    Sums sums[16];
    UNROLL
    for (int i = 0; i < 16; i++) sums[i] = no_sums();
    for (long i = 0; i < k; i += WIDTH) {
        const Lanes mask = k - i < WIDTH ? lanes(k - i) : ALL_LANES;
        UNROLL
        for (int part = 0; part < PARTS; part++) {
            Numbers loaded[4];
            UNROLL
            for (int b = 0; b < columns; b++) loaded[b] = load(matrix + b * k + i, part, mask);
            UNROLL
            for (int a = 0; a < rows; a++) {
                const Numbers values = load_operands(x + a * k + i, part, mask);
                UNROLL
                for (int b = 0; b < columns; b++)
                    sums[a * columns + b] = add_product(sums[a * columns + b], values, loaded[b]);
            }
        }
    }
    number found[16];
    store_narrow(found, sum_lanes(sums, rows * columns));
    UNROLL
    for (int a = 0; a < rows; a++)
        memcpy(out + a * out_stride, found + a * columns, columns * sizeof(number));
}

// Rows of x times the transpose of [outputs, inputs].
static void multiply_across(const HeadProducts *p, const number *matrix, const number *x,
                            long x_stride, number *out, long out_stride, long tokens) {
    const long k = p->inputs;
    Operand rows[tokens * k];
    for (long t = 0; t < tokens; t++) lay_out_operands(x + t * x_stride, k, rows + t * k);
    for (long column = 0, wide; column < p->outputs; column += wide) {
        const number *here = matrix + column * k;
        wide = p->outputs - column < 4 ? 1 : 4;
        for (long t = 0, some; t < tokens; t += some) {
            const Operand *those = rows + t * k;
            number *to = out + t * out_stride + column;
            some = tokens - t < MULTIPLIED_TOGETHER ? 1 : MULTIPLIED_TOGETHER;
            switch (10 * some + wide) {
            case 11: put_dots(1, 1, those, here, k, to, out_stride); break;
            case 14: put_dots(1, 4, those, here, k, to, out_stride); break;
            case 10 * MULTIPLIED_TOGETHER + 1:
                put_dots(MULTIPLIED_TOGETHER, 1, those, here, k, to, out_stride);
                break;
            default: put_dots(MULTIPLIED_TOGETHER, 4, those, here, k, to, out_stride); break;
            }
        }
    }
}

static void head_products_by_team(const HeadProducts *p, const HeadRows *r, long tokens) {
    const long blocks = (tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
#pragma omp for schedule(dynamic)
    for (long item = 0; item < p->heads * blocks; item++) {
        const long head = item / blocks, from = item % blocks * BLOCK_TOKENS;
        const long some = tokens - from < BLOCK_TOKENS ? tokens - from : BLOCK_TOKENS;
        const number *matrix = p->matrices + head * p->head_stride;
        const number *x = r->x + from * r->x_token + head * r->x_head;
        number *out = r->out + from * r->out_token + head * r->out_head;
        if (p->across)
            multiply_across(p, matrix, x, r->x_token, out, r->out_token, some);
        else
            multiply_along(p, matrix, x, r->x_token, out, r->out_token, some);
    }
}
