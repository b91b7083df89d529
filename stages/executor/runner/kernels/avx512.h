// Vectors of 16 floats with AVX-512: one register.

#ifndef __AVX512F__
#error "this processor has no AVX-512"
#endif

typedef __m512 Floats;

INLINE Floats spread(float f) { return _mm512_set1_ps(f); }

INLINE Floats zeros(void) { return _mm512_setzero_ps(); }

INLINE Floats load_floats(const float *p) { return _mm512_loadu_ps(p); }

INLINE Floats load_floats_some(const float *p, Mask mask) { return _mm512_maskz_loadu_ps(mask, p); }

// 16 numbers of other types.
INLINE Floats load_halves(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

INLINE Floats load_bfloats(const uint16_t *p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return (__m512)_mm512_slli_epi32(wide, 16);
}

INLINE Floats load_bytes(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

// 2^(n - 127) of bytes n: infinity of the last one.
INLINE Floats load_exponents(const uint8_t *p) {
    const __m512i n = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    const __m512i bits = _mm512_max_epi32(_mm512_slli_epi32(n, 23), _mm512_set1_epi32(1 << 22));
    return (__m512)bits;
}

// Those of `over` in the other lanes.
INLINE Floats load_floats_over(Floats over, const float *p, Mask mask) {
    return _mm512_mask_loadu_ps(over, mask, p);
}

INLINE void store_floats(float *p, Floats v) { _mm512_storeu_ps(p, v); }

INLINE void store_floats_some(float *p, Mask mask, Floats v) { _mm512_mask_storeu_ps(p, mask, v); }

INLINE Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }

INLINE Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }

INLINE Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }

INLINE Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }

INLINE Floats minimum(Floats a, Floats b) { return _mm512_min_ps(a, b); }

INLINE Floats maximum(Floats a, Floats b) { return _mm512_max_ps(a, b); }

// a * b + c
INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }

// c - a * b
INLINE Floats multiply_subtract(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }

// The nearest whole numbers.
INLINE Floats nearest(Floats v) { return _mm512_roundscale_ps(v, 0); }

// v * 2^n of whole n.
INLINE Floats times_power_of_two(Floats v, Floats n) { return _mm512_scalef_ps(v, n); }

// Some lanes of v, zeros in the others.
INLINE Floats only(Mask mask, Floats v) { return _mm512_maskz_mov_ps(mask, v); }

// Some lanes of b, those of a in the others.
INLINE Floats merged(Floats a, Mask mask, Floats b) { return _mm512_mask_mov_ps(a, mask, b); }

INLINE float sum_of(Floats v) { return _mm512_reduce_add_ps(v); }

INLINE float largest_of(Floats v) { return _mm512_reduce_max_ps(v); }

// The lanes that are NaN.
INLINE Mask not_numbers(Floats v) { return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q); }

INLINE Mask equal_lanes(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }

INLINE int any_greater(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }

// Transposes 16 vectors of 16 numbers of 32 bits.
INLINE void transpose(Floats *v) {
    __m512 w[16];
    UNROLL
    for (int i = 0; i < 16; i += 2) {
        w[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
        w[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
    }
    UNROLL
    for (int i = 0; i < 16; i += 4) UNROLL
    for (int j = 0; j < 2; j++) {
        const __m512d x = (__m512d)w[i + j], y = (__m512d)w[i + j + 2];
        v[i + 2 * j] = (__m512)_mm512_unpacklo_pd(x, y);
        v[i + 2 * j + 1] = (__m512)_mm512_unpackhi_pd(x, y);
    }
    UNROLL
    for (int i = 0; i < 16; i += 8) UNROLL
    for (int j = i; j < i + 4; j++) {
        w[j] = _mm512_shuffle_f32x4(v[j], v[j + 4], 0x88);
        w[j + 4] = _mm512_shuffle_f32x4(v[j], v[j + 4], 0xdd);
    }
    UNROLL
    for (int i = 0; i < 8; i++) {
        v[i] = _mm512_shuffle_f32x4(w[i], w[i + 8], 0x88);
        v[i + 8] = _mm512_shuffle_f32x4(w[i], w[i + 8], 0xdd);
    }
}

// --- dot products -------------------------------------------------------------------------------

typedef __m512 Sums;  // of one dot product

// Keeps a vector in its register: GCC would load it from memory for each use, and loads per cycle
// would limit the multiplications.
INLINE __m512 held(__m512 v) {
    __asm__("" : "+v"(v));
    return v;
}

INLINE Sums no_sums(void) { return _mm512_setzero_ps(); }

// The sums of up to 16 vectors' lanes, in their order. All take the same tree.
INLINE Floats sum_lanes(const Sums *v, int count) {
    (void)count;  // unused vectors are zeros
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
