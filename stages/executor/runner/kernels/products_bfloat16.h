// Dot products of bfloat16 with AVX512-BF16.

typedef __m512bh Numbers;  // a vector full of them
typedef __mmask32 Lanes;   // some of a vector
typedef number Operand;

enum {
    WIDTH = 32,  // numbers in a vector, which is a cache line
    PARTS = 1,
};
#define ALL_LANES 0xffffffffu

INLINE Lanes lanes(long count) { return count >= 32 ? 0xffffffffu : (1u << count) - 1; }

INLINE Numbers load(const number *p, int part, Lanes mask) {
    (void)part;
    return (Numbers)_mm512_maskz_loadu_epi16(mask, p);
}

// Adds products of numbers to sums, in each lane those of two neighbours.
INLINE Sums add_product(Sums sums, Numbers a, Numbers b) { return _mm512_dpbf16_ps(sums, a, b); }

#include "products_avx512.h"

// --- values of attention ------------------------------------------------------------------------

// Lays up to 32 numbers of 16 positions' values side by side for add_values: in pairs of
// neighbours, so that one instruction multiplies both.
INLINE void lay_out_values(const number *const *values, long offset, long count, number *to) {
    const Lanes mask = lanes(count);
    UNROLL
    for (int j = 0; j < 16; j += 2, to += 64) {
        __m512i x = _mm512_maskz_loadu_epi16(mask, values[j] + offset);
        __m512i y = _mm512_maskz_loadu_epi16(mask, values[j + 1] + offset);
        _mm512_storeu_si512(to, _mm512_unpacklo_epi16(x, y));
        _mm512_storeu_si512(to + 32, _mm512_unpackhi_epi16(x, y));
    }
}

// Reorders sums of add_values, two vectors, to the order of the values: unpacking has interleaved
// groups of four.
INLINE void put_in_order(__m512 *x, __m512 *y) {
    const __m512i to_low =
        _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i to_high = _mm512_add_epi32(to_low, _mm512_set1_epi32(8));
    const __m512 low = _mm512_permutex2var_ps(*x, to_low, *y);
    *y = _mm512_permutex2var_ps(*x, to_high, *y);
    *x = low;
}
