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

// As add_values leaves them.
INLINE void put_in_order(__m512 *x, __m512 *y) { (void)x, (void)y; }
