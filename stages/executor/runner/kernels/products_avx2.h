// Dot products with AVX2: of floats, to which bfloat16 is widened. One side, the operands, is
// widened beforehand and used many times.

typedef __m256 Numbers;  // eight of them
typedef long Lanes;      // the first ones of a step
typedef float Operand;

enum {
    WIDTH = 16,  // numbers in a step
    PARTS = 2,
};
#define ALL_LANES WIDTH

INLINE Lanes lanes(long count) { return count; }

INLINE Numbers load_operands(const Operand *p, int part, Lanes count) {
    p += part * 8;
    if (count == ALL_LANES) return _mm256_loadu_ps(p);
    return _mm256_maskload_ps(p, lanes_of(first(count - part * 8), 0));
}

// In assembly: GCC would choose among the forms of the instruction, and run out of registers.
INLINE Sums add_product(Sums sums, Numbers a, Numbers b) {
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(sums) : "x"(a), "x"(b));
    return sums;
}

// The same, with operands in memory.
INLINE Sums add_product_from(Sums sums, Numbers a, const Operand *p, int part) {
    __asm__("vfmadd231ps %2, %1, %0"
            : "+x"(sums)
            : "x"(a), "m"(*(const float (*)[8])(p + part * 8)));
    return sums;
}

enum { WIDENED = sizeof(Operand) > sizeof(number) };

#ifdef FLOAT32

INLINE Numbers load(const number *p, int part, Lanes count) {
    return load_operands(p, part, count);
}

INLINE void store_operands(Operand *p, Floats v) { store_floats(p, v); }

INLINE void lay_out_operands(const number *from, long count, Operand *to) {
    memcpy(to, from, count * sizeof(number));
}

INLINE const Operand *operands_of(const number *rows, long count, long k, Operand **rest) {
    (void)count, (void)k, (void)rest;
    return rows;
}

#else

static const uint32_t high_halves[8] __attribute__((aligned(32))) = {
    0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
};

// The parts of a whole step are its even and its odd numbers: one instruction widens each.
INLINE Numbers load(const number *p, int part, Lanes count) {
    if (count == ALL_LANES) {
        const __m256i both = _mm256_loadu_si256((const __m256i *)p);
        if (part == 0) return (Numbers)_mm256_slli_epi32(both, 16);
        // In assembly, since GCC would keep the constant in a register that the sums need.
        __m256i odd;
        __asm__("vpand %2, %1, %0" : "=x"(odd) : "x"(both), "m"(high_halves));
        return (Numbers)odd;
    }
    number rest[16] = {0};
    copy_some(rest, p, first(count));
    return widen_eight(_mm_loadu_si128((const __m128i *)(rest + part * 8)));
}

INLINE void store_operands(Operand *p, Floats v) { store_floats(p, rounded(v)); }

// Widens a row, in the order of `load`.
INLINE void lay_out_operands(const number *from, long count, Operand *to) {
    for (; count >= WIDTH; count -= WIDTH, from += WIDTH, to += WIDTH) UNROLL
    for (int part = 0; part < PARTS; part++)
        _mm256_storeu_ps(to + part * 8, load(from, part, ALL_LANES));
    for (long i = 0; i < count; i++) to[i] = wide(from[i]);
}

// Rows as operands, in this thread's memory, and room for eight rows more.
static const Operand *operands_of(const number *rows, long count, long k, Operand **rest) {
    Operand *to = memory_for((count + 8) * k * sizeof(Operand));
    *rest = to + count * k;
    for (long row = 0; row < count; row++) lay_out_operands(rows + row * k, k, to + row * k);
    return to;
}

#endif

// --- values of attention ------------------------------------------------------------------------

// Lays up to 32 numbers of 16 positions' values side by side for add_values.
INLINE void lay_out_values(const number *const *values, long offset, long count, Operand *to) {
    UNROLL
    for (int j = 0; j < 16; j++, to += 32) {
        store_floats(to, load_wide_some(values[j] + offset, first(count)));
        store_floats(to + 16, load_wide_some(values[j] + offset + 16, first(count - 16)));
    }
}

enum { MOST_ADDED = 3 };  // rows of 32 sums each that stay in registers

// Adds weighted values of positions, a multiple of 16 in the layout above, to 32 sums of each row.
// fresh: the sums are none yet.
INLINE void add_values(int rows, int vectors, float *sums, long width, const Operand *weights,
                       long stride, const Operand *values, long apart, long positions, int fresh) {
    __m256 of[3][4];
    (void)vectors, (void)apart;  // always 2
    UNROLL
    for (int a = 0; a < rows; a++) UNROLL
    for (int i = 0; i < 4; i++) of[a][i] = _mm256_setzero_ps();
    for (long j = 0; j < positions; j++, values += 32) {
        __m256 weight[3];
        UNROLL
        for (int a = 0; a < rows; a++) weight[a] = _mm256_set1_ps(weights[a * stride + j]);
        UNROLL
        for (int i = 0; i < 4; i++) {
            const __m256 some = _mm256_loadu_ps(values + i * 8);
            UNROLL
            for (int a = 0; a < rows; a++) of[a][i] = _mm256_fmadd_ps(weight[a], some, of[a][i]);
        }
    }
    UNROLL
    for (int a = 0; a < rows; a++) UNROLL
    for (int i = 0; i < 4; i++) {
        float *to = sums + a * width + i * 8;
        if (!fresh) of[a][i] = _mm256_add_ps(_mm256_loadu_ps(to), of[a][i]);
        _mm256_storeu_ps(to, of[a][i]);
    }
}

// As add_values leaves them.
INLINE void put_in_order(Floats *x, Floats *y) { (void)x, (void)y; }
