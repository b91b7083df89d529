// What both dtypes' products with AVX-512 share: numbers are operands as they are.

enum { WIDENED = 0 };

INLINE Numbers load_operands(const Operand *p, int part, Lanes mask) { return load(p, part, mask); }

INLINE void store_operands(Operand *p, Floats v) { store_narrow(p, v); }

INLINE void lay_out_operands(const number *from, long count, Operand *to) {
    memcpy(to, from, count * sizeof(number));
}

INLINE const Operand *operands_of(const number *rows, long count, long k, Operand **rest) {
    (void)count, (void)k, (void)rest;
    return rows;
}

// --- values of attention ------------------------------------------------------------------------

enum {
    MOST_ADDED = 6,                                // rows of 64 sums each that stay in registers
    MULTIPLIED = sizeof(float) / sizeof(Operand),  // numbers of a row, by one instruction
};

// Adds weighted values of positions, a multiple of 16 in the layout of lay_out_values, to 16 sums
// of each row for each of 2 or 4 vectors. The second 32 are `apart` from the first.
// fresh: the sums are none yet.
INLINE void add_values(int rows, int vectors, float *sums, long width, const Operand *weights,
                       long stride, const Operand *values, long apart, long positions, int fresh) {
    Sums of[MOST_ADDED][4];
    UNROLL
    for (int a = 0; a < rows; a++) UNROLL
    for (int v = 0; v < vectors; v++) of[a][v] = no_sums();
    for (long j = 0; j < positions; j += MULTIPLIED, values += 32 * MULTIPLIED) {
        Numbers some[4];
        UNROLL
        for (int v = 0; v < vectors; v++)
            some[v] = load(values + v / 2 * apart + v % 2 * WIDTH, 0, ALL_LANES);
        UNROLL
        for (int a = 0; a < rows; a++) {
            int weight;
            memcpy(&weight, weights + a * stride + j, sizeof weight);
            const Numbers spread_out = (Numbers)_mm512_set1_epi32(weight);
            UNROLL
            for (int v = 0; v < vectors; v++) of[a][v] = add_product(of[a][v], spread_out, some[v]);
        }
    }
    UNROLL
    for (int a = 0; a < rows; a++) UNROLL
    for (int v = 0; v < vectors; v++) {
        float *to = sums + a * width + v * 16;
        store_floats(to, fresh ? of[a][v] : add(load_floats(to), of[a][v]));
    }
}
