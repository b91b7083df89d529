// Shared functions on vectors of 16 floats. Their type, Floats, and the operations on it are in the
// headers named after the instructions.

#ifndef VECTORS_H
#define VECTORS_H

#include <immintrin.h>
#include <limits.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

// Below this number of multiplications, other threads are not woken.
#define PARALLEL_WORK 65536

INLINE long larger(long a, long b) { return a > b ? a : b; }

// This thread's scratch memory, reused by each call.
static inline void *memory_for(long bytes) {
    static _Thread_local void *memory;
    static _Thread_local long size;
    if (bytes > size) {
        free(memory);
        size = (bytes + 63) / 64 * 64;
        memory = aligned_alloc(64, size);
    }
    return memory;
}

typedef uint16_t Mask;  // some of 16 lanes, the lowest bit for the first

INLINE Mask first(long count) {
    return count >= 16 ? 0xffff : count <= 0 ? 0 : (Mask)((1u << count) - 1);
}

#ifdef AVX2
#include "avx2.h"
#else
#include "avx512.h"
#endif

// exp to about 1e-7 relative; 0 below the least float, for -inf too. NaN stays NaN: if one operand
// is NaN, minimum and maximum return the second. Range reduction and minimax polynomial
// after Cephes' expf (Moshier).
INLINE Floats exponential(Floats x) {
    x = minimum(spread(88.7f), x);
    x = maximum(spread(-104.0f), x);
    Floats n = nearest(multiply(x, spread(1.44269504088896341f)));
    x = multiply_subtract(n, spread(0.693359375f), x);
    x = multiply_subtract(n, spread(-2.12194440e-4f), x);
    Floats y = spread(1.9875691500e-4f);
    y = multiply_add(y, x, spread(1.3981999507e-3f));
    y = multiply_add(y, x, spread(8.3334519073e-3f));
    y = multiply_add(y, x, spread(4.1665795894e-2f));
    y = multiply_add(y, x, spread(1.6666665459e-1f));
    y = multiply_add(y, x, spread(5.0000001201e-1f));
    y = multiply_add(y, multiply(x, x), add(x, spread(1.0f)));
    return times_power_of_two(y, n);
}

// tanh(x) = 1 - 2 / (exp(2x) + 1)
INLINE Floats hyperbolic_tangent(Floats x) {
    Floats one = spread(1.0f);
    Floats e = exponential(add(x, x));
    return subtract(one, divide(spread(2.0f), add(e, one)));
}

#endif
