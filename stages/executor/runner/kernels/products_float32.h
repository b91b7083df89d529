// Dot products of float32 with AVX-512.

typedef __m512 Numbers;   // a vector full of them
typedef __mmask16 Lanes;  // some of a vector
typedef number Operand;

enum {
    WIDTH = 16,  // numbers in a vector, which is a cache line
    PARTS = 1,
};
#define ALL_LANES 0xffffu

INLINE Lanes lanes(long count) { return first(count); }

INLINE Numbers load(const number *p, int part, Lanes mask) {
    (void)part;
    return held(_mm512_maskz_loadu_ps(mask, p));
}

// Adds products of numbers to sums.
INLINE Sums add_product(Sums sums, Numbers a, Numbers b) { return _mm512_fmadd_ps(a, b, sums); }

#include "products_avx512.h"

// --- values of attention ------------------------------------------------------------------------

// Lays up to 32 numbers of 16 positions' values side by side for add_values.
INLINE void lay_out_values(const number *const *values, long offset, long count, number *to) {
    UNROLL
    for (int j = 0; j < 16; j++, to += 32) {
        const number *from = values[j] + offset;
        _mm512_storeu_ps(to, _mm512_maskz_loadu_ps(first(count), from));
        _mm512_storeu_ps(to + 16, _mm512_maskz_loadu_ps(first(count - 16), from + 16));
    }
}

// Adds weighted values of positions, a multiple of 16 in the layout above, to 32 sums of each row.
// Even and odd positions have separate sums, to hide the latency of additions.
INLINE void add_values(int rows, float *sums, long width, const number *weights, long stride,
                       const number *values, long positions) {
    __m512 x[4][2], y[4][2];
    UNROLL
    for (int a = 0; a < rows; a++) {
        x[a][0] = _mm512_loadu_ps(sums + a * width);
        y[a][0] = _mm512_loadu_ps(sums + a * width + 16);
        x[a][1] = y[a][1] = _mm512_setzero_ps();
    }
    for (long j = 0; j < positions; j += 2) UNROLL
    for (int i = 0; i < 2; i++, values += 32) {
        const Numbers low = load(values, 0, ALL_LANES), high = load(values + 16, 0, ALL_LANES);
        UNROLL
        for (int a = 0; a < rows; a++) {
            const __m512 weight = _mm512_set1_ps(weights[a * stride + j + i]);
            x[a][i] = _mm512_fmadd_ps(weight, low, x[a][i]);
            y[a][i] = _mm512_fmadd_ps(weight, high, y[a][i]);
        }
    }
    UNROLL
    for (int a = 0; a < rows; a++) {
        _mm512_storeu_ps(sums + a * width, _mm512_add_ps(x[a][0], x[a][1]));
        _mm512_storeu_ps(sums + a * width + 16, _mm512_add_ps(y[a][0], y[a][1]));
    }
}

// As add_values leaves them.
INLINE void put_in_order(__m512 *x, __m512 *y) { (void)x, (void)y; }
