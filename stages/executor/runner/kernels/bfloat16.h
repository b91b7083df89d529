// Numbers of cpu.c for bfloat16 models. Sums and functions are in float32, and rounded to bfloat16
// in the same places as in Transformers' code.

typedef uint16_t number;

#ifdef AVX2

INLINE __m256 widen_eight(__m128i v) {
    return (__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16);
}

// 16 numbers as floats.
INLINE Floats load_wide(const number *p) {
    return (Floats){widen_eight(_mm_loadu_si128((const __m128i *)p)),
                    widen_eight(_mm_loadu_si128((const __m128i *)(p + 8)))};
}

// The nearest numbers as floats, the even one of two that are as near. NaN stays NaN.
INLINE __m256 round_eight(__m256 v) {
    const __m256i bits = (__m256i)v, one = _mm256_set1_epi32(1);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    const __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256 broken = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
    const __m256 found = _mm256_blendv_ps((__m256)sum, (__m256)quiet, broken);
    return _mm256_and_ps(found, (__m256)_mm256_set1_epi32(0xffff0000));
}

INLINE Floats rounded(Floats v) { return (Floats){round_eight(v.low), round_eight(v.high)}; }

// 16 floats as numbers.
INLINE void store_narrow(number *p, Floats v) {
    const __m256i low = _mm256_srli_epi32((__m256i)round_eight(v.low), 16);
    const __m256i high = _mm256_srli_epi32((__m256i)round_eight(v.high), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
    _mm256_storeu_si256((__m256i *)p, packed);
}

// Copies some of 16 numbers. Not inlined: it is used in many places, for the end of a row.
static __attribute__((noinline)) void copy_some(number *to, const number *from, Mask mask) {
    for (; mask; mask &= mask - 1) to[__builtin_ctz(mask)] = from[__builtin_ctz(mask)];
}

INLINE Floats load_wide_some(const number *p, Mask mask) {
    if (mask == 0xffff) return load_wide(p);
    number numbers[16] = {0};
    copy_some(numbers, p, mask);
    return load_wide(numbers);
}

INLINE void store_narrow_some(number *p, Mask mask, Floats v) {
    if (mask == 0xffff) return store_narrow(p, v);
    number numbers[16];
    store_narrow(numbers, v);
    copy_some(p, numbers, mask);
}

#else

#ifndef __AVX512BF16__
#error "this processor has no AVX512-BF16"
#endif

INLINE __m512 widen(__m256i v) { return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16); }

INLINE __m256i narrow(__m512 v) { return (__m256i)_mm512_cvtneps_pbh(v); }

// 16 numbers as floats.
INLINE Floats load_wide(const number *p) { return widen(_mm256_loadu_si256((const __m256i *)p)); }

INLINE Floats load_wide_some(const number *p, Mask mask) {
    return widen(_mm256_maskz_loadu_epi16(mask, p));
}

// 16 floats as numbers.
INLINE void store_narrow(number *p, Floats v) { _mm256_storeu_si256((__m256i *)p, narrow(v)); }

INLINE void store_narrow_some(number *p, Mask mask, Floats v) {
    _mm256_mask_storeu_epi16(p, mask, narrow(v));
}

INLINE Floats rounded(Floats v) { return widen(narrow(v)); }

#endif

INLINE float wide(number v) {
    uint32_t bits = (uint32_t)v << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

#ifdef AVX2
#include "products_avx2.h"
#else
#include "products_bfloat16.h"
#endif
