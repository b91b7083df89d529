// Products of attention by vectors.

enum {
    GATHERED = 16,                                  // positions per gather
    MOST_TOGETHER = MOST_ROWS < 4 ? MOST_ROWS : 4,  // rows that are multiplied together
    KEYS_AS_NUMBERS = !WIDENED,                     // laid out as such, row by row
    GRAIN = MOST_TOGETHER,
};

INLINE void begin_attention(void) {}

INLINE void end_attention(void) {}

INLINE void lay_out_keys(const number *const *keys, long width, Operand *to) {
    const long padded = (width + WIDTH - 1) / WIDTH * WIDTH;
    for (long j = 0; j < 16; j++) lay_out_operands(keys[j], width, to + j * padded);
}

// Scores of some rows and 16 positions, `columns` at a time.
INLINE void score_rows(int rows, int columns, long width, const Operand *queries,
                       const Operand *keys, float *scores) {
    for (long column = 0; column < 16; column += columns) {
        const Weights some = {(const number *)(keys + column * width), NULL, WIDENED};
        const Floats found = dot_products(rows, columns, queries, some, width, NULL, 0).of[0];
        float result[16];
        store_floats(result, found);
        UNROLL
        for (int i = 0; i < rows; i++)
            memcpy(scores + i * CHUNK + column, result + i * columns, columns * sizeof(float));
    }
}

// Scores of all rows and 16 positions of a chunk, from `offset` on; of some rows at a time, unless
// none of them sees the positions.
static void score(const Rows *r, long chunk, long offset) {
    const long width = r->key_width;
    for (long row = 0; row < r->rows; row += MOST_TOGETHER) {
        const long some = r->rows - row < MOST_TOGETHER ? r->rows - row : MOST_TOGETHER;
        const Operand *queries = r->queries + row * width;
        float *scores = r->scores + row * CHUNK + offset;
        long used = 0;
        for (long i = 0; i < some; i++) used = larger(used, used_by(r, row + i, chunk));
        if (used <= offset) continue;
        switch (some) {
        case 1: score_rows(1, 4 * MOST_TOGETHER / 8 * 8, width, queries, r->keys, scores); break;
        case 2: score_rows(2, 2 * MOST_TOGETHER / 4 * 4, width, queries, r->keys, scores); break;
        case 3: score_rows(3, 4, width, queries, r->keys, scores); break;
        default: score_rows(MOST_TOGETHER, 4, width, queries, r->keys, scores); break;
        }
    }
}

// Adds a chunk's values to the sums of all rows, 32 numbers at a time, which stay in the cache.
// Several rows at once, if they see as many positions.
static void add_chunk(const Rows *r, long chunk) {
    const long stride = CHUNK * sizeof(float) / sizeof(Operand);
    for (long part = 0; part < r->padded; part += 32) {
        const Operand *values = r->values + part * CHUNK;
        for (long row = 0, some; row < r->rows; row += some) {
            float *sums = r->sums + row * r->padded + part;
            const Operand *weights = (const Operand *)(r->scores + row * CHUNK);
            const long used = used_by(r, row, chunk);
            some = 1;
            while (some < MOST_TOGETHER && row + some < r->rows
                   && used_by(r, row + some, chunk) == used)
                some++;
            switch (some) {
            case 1: add_values(1, sums, r->padded, weights, stride, values, used); break;
            case 2: add_values(2, sums, r->padded, weights, stride, values, used); break;
            case 3: add_values(3, sums, r->padded, weights, stride, values, used); break;
            default:
                add_values(MOST_TOGETHER, sums, r->padded, weights, stride, values, used);
                break;
            }
        }
    }
}
