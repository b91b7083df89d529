// Numbers of cpu.c for bfloat16 models. Sums and functions are in float32, and rounded to bfloat16
// in the same places as in Transformers' code.

#ifndef __AVX512BF16__
#error "this processor has no AVX512-BF16"
#endif

typedef uint16_t number;
typedef __m512bh Numbers;  // a vector full of them
typedef __mmask32 Lanes;   // some of a vector

enum { WIDTH = 32 };  // numbers in a vector, which is a cache line
#define ALL_LANES 0xffffffffu

INLINE Lanes lanes(long count) { return count >= 32 ? 0xffffffffu : (1u << count) - 1; }

INLINE Numbers load(const number *p, Lanes mask) {
    return (Numbers)_mm512_maskz_loadu_epi16(mask, p);
}

// Adds products of numbers to sums, in each lane those of two neighbours.
INLINE __m512 add_product(__m512 sums, Numbers a, Numbers b) {
    return _mm512_dpbf16_ps(sums, a, b);
}

INLINE __m512 widen(__m256i v) { return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16); }

INLINE __m256i narrow(__m512 v) { return (__m256i)_mm512_cvtneps_pbh(v); }

// 16 numbers as floats.
INLINE __m512 load_wide(const number *p) { return widen(_mm256_loadu_si256((const __m256i *)p)); }

INLINE __m512 load_wide_some(const number *p, __mmask16 mask) {
    return widen(_mm256_maskz_loadu_epi16(mask, p));
}

// 16 floats as numbers.
INLINE void store_narrow(number *p, __m512 v) { _mm256_storeu_si256((__m256i *)p, narrow(v)); }

INLINE void store_narrow_some(number *p, __mmask16 mask, __m512 v) {
    _mm256_mask_storeu_epi16(p, mask, narrow(v));
}

INLINE __m512 rounded(__m512 v) { return widen(narrow(v)); }

INLINE float wide(number v) {
    uint32_t bits = (uint32_t)v << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

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

// Adds weighted values of positions, a multiple of 16 in the layout above, to 32 sums of each row.
INLINE void add_values(int rows, float *sums, long width, const number *weights, long stride,
                       const number *values, long positions) {
    __m512 x[4], y[4];
    UNROLL
    for (int a = 0; a < rows; a++) {
        x[a] = _mm512_loadu_ps(sums + a * width);
        y[a] = _mm512_loadu_ps(sums + a * width + 16);
    }
    for (long j = 0; j < positions; j += 2, values += 64) {
        const Numbers low = load(values, ALL_LANES), high = load(values + 32, ALL_LANES);
        UNROLL
        for (int a = 0; a < rows; a++) {
            int two;
            memcpy(&two, weights + a * stride + j, sizeof two);
            const Numbers weight = (Numbers)_mm512_set1_epi32(two);
            x[a] = _mm512_dpbf16_ps(x[a], weight, low);
            y[a] = _mm512_dpbf16_ps(y[a], weight, high);
        }
    }
    UNROLL
    for (int a = 0; a < rows; a++) {
        _mm512_storeu_ps(sums + a * width, x[a]);
        _mm512_storeu_ps(sums + a * width + 16, y[a]);
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
