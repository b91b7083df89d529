// Shared functions on vectors of 16 floats.

#ifndef VECTORS_H
#define VECTORS_H

#include <immintrin.h>
#include <limits.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef __AVX512F__
#error "this processor has no AVX-512"
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

// Below this number of multiplications, other threads are not woken.
#define PARALLEL_WORK 65536

INLINE long larger(long a, long b) { return a > b ? a : b; }

INLINE __mmask16 first(long count) {
    return count >= 16 ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1);
}

// Keeps a vector in its register: GCC would load it from memory for each use, and loads per cycle
// would limit the multiplications.
INLINE __m512 held(__m512 v) {
    __asm__("" : "+v"(v));
    return v;
}

// The sums of 16 vectors' lanes, in their order. All take the same tree.
INLINE __m512 sum_lanes(const __m512 *v) {
    __m512 a[8], b[4], c[2];
    UNROLL
    for (int i = 0; i < 8; i++)
        a[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]),
                             _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    UNROLL
    for (int i = 0; i < 4; i++) {
        __m512d x = (__m512d)a[2 * i], y = (__m512d)a[2 * i + 1];
        b[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(x, y), (__m512)_mm512_unpackhi_pd(x, y));
    }
    UNROLL
    for (int i = 0; i < 2; i++)
        c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88),
                         _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
}

// exp to about 1e-7 relative; 0 below the least float, for -inf too. NaN stays NaN: if one operand
// is NaN, minimum and maximum return the second. Range reduction and minimax polynomial
// after Cephes' expf (Moshier).
INLINE __m512 exponential(__m512 x) {
    x = _mm512_min_ps(_mm512_set1_ps(88.7f), x);
    x = _mm512_max_ps(_mm512_set1_ps(-104.0f), x);
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 0);
    x = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    x = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), x);
    __m512 y = _mm512_set1_ps(1.9875691500e-4f);
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(1.3981999507e-3f));
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(8.3334519073e-3f));
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(4.1665795894e-2f));
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(1.6666665459e-1f));
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(5.0000001201e-1f));
    y = _mm512_fmadd_ps(y, _mm512_mul_ps(x, x), _mm512_add_ps(x, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(y, n);
}

// tanh(x) = 1 - 2 / (exp(2x) + 1)
INLINE __m512 hyperbolic_tangent(__m512 x) {
    __m512 one = _mm512_set1_ps(1.0f);
    __m512 e = exponential(_mm512_add_ps(x, x));
    return _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(e, one)));
}

#endif
