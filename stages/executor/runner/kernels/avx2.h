// Vectors of 16 floats with AVX2 and FMA: two registers of eight.

#if !defined(__AVX2__) || !defined(__FMA__)
#error "this processor has no AVX2 with FMA"
#endif

typedef struct {
    __m256 low, high;
} Floats;

// A mask's eight lanes from `lane` on, for instructions that take vectors as masks.
INLINE __m256i lanes_of(Mask mask, int lane) {
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(mask >> lane), bits), bits);
}

INLINE Floats spread(float f) { return (Floats){_mm256_set1_ps(f), _mm256_set1_ps(f)}; }

INLINE Floats zeros(void) { return spread(0.0f); }

INLINE Floats load_floats(const float *p) {
    return (Floats){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}

// 16 numbers of other types.
INLINE Floats load_halves(const uint16_t *p) {
    return (Floats){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                    _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}

INLINE __m256 eight_bfloats(const uint16_t *p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return (__m256)_mm256_slli_epi32(wide, 16);
}

INLINE Floats load_bfloats(const uint16_t *p) {
    return (Floats){eight_bfloats(p), eight_bfloats(p + 8)};
}

INLINE __m256 eight_bytes(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}

INLINE Floats load_bytes(const int8_t *p) { return (Floats){eight_bytes(p), eight_bytes(p + 8)}; }

INLINE __m256 eight_exponents(const uint8_t *p) {
    const __m256i n = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
    return (__m256)_mm256_max_epi32(_mm256_slli_epi32(n, 23), _mm256_set1_epi32(1 << 22));
}

// 2^(n - 127) of bytes n: infinity of the last one.
INLINE Floats load_exponents(const uint8_t *p) {
    return (Floats){eight_exponents(p), eight_exponents(p + 8)};
}

INLINE Floats load_floats_some(const float *p, Mask mask) {
    if (mask == 0xffff) return load_floats(p);
    return (Floats){_mm256_maskload_ps(p, lanes_of(mask, 0)),
                    _mm256_maskload_ps(p + 8, lanes_of(mask, 8))};
}

// Some lanes of v, zeros in the others.
INLINE Floats only(Mask mask, Floats v) {
    if (mask == 0xffff) return v;
    return (Floats){_mm256_and_ps((__m256)lanes_of(mask, 0), v.low),
                    _mm256_and_ps((__m256)lanes_of(mask, 8), v.high)};
}

// Some lanes of b, those of a in the others.
INLINE Floats merged(Floats a, Mask mask, Floats b) {
    if (mask == 0xffff) return b;
    return (Floats){_mm256_blendv_ps(a.low, b.low, (__m256)lanes_of(mask, 0)),
                    _mm256_blendv_ps(a.high, b.high, (__m256)lanes_of(mask, 8))};
}

// Those of `over` in the other lanes.
INLINE Floats load_floats_over(Floats over, const float *p, Mask mask) {
    return merged(over, mask, load_floats_some(p, mask));
}

INLINE void store_floats(float *p, Floats v) {
    _mm256_storeu_ps(p, v.low);
    _mm256_storeu_ps(p + 8, v.high);
}

INLINE void store_floats_some(float *p, Mask mask, Floats v) {
    if (mask == 0xffff) return store_floats(p, v);
    _mm256_maskstore_ps(p, lanes_of(mask, 0), v.low);
    _mm256_maskstore_ps(p + 8, lanes_of(mask, 8), v.high);
}

INLINE Floats add(Floats a, Floats b) {
    return (Floats){_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}

INLINE Floats subtract(Floats a, Floats b) {
    return (Floats){_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}

INLINE Floats multiply(Floats a, Floats b) {
    return (Floats){_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}

INLINE Floats divide(Floats a, Floats b) {
    return (Floats){_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}

INLINE Floats minimum(Floats a, Floats b) {
    return (Floats){_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}

INLINE Floats maximum(Floats a, Floats b) {
    return (Floats){_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}

// a * b + c
INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
    return (Floats){_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}

// c - a * b
INLINE Floats multiply_subtract(Floats a, Floats b, Floats c) {
    return (Floats){_mm256_fnmadd_ps(a.low, b.low, c.low),
                    _mm256_fnmadd_ps(a.high, b.high, c.high)};
}

// The nearest whole numbers.
INLINE Floats nearest(Floats v) {
    return (Floats){_mm256_round_ps(v.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                    _mm256_round_ps(v.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

// In two factors, since 2^n may be no float where the product is one.
INLINE __m256 times_power(__m256 v, __m256 n) {
    const __m256i bias = _mm256_set1_epi32(127), whole = _mm256_cvtps_epi32(n);
    const __m256i half = _mm256_srai_epi32(whole, 1), rest = _mm256_sub_epi32(whole, half);
    v = _mm256_mul_ps(v, (__m256)_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    return _mm256_mul_ps(v, (__m256)_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
}

// v * 2^n of whole n from -250 to 250.
INLINE Floats times_power_of_two(Floats v, Floats n) {
    return (Floats){times_power(v.low, n.low), times_power(v.high, n.high)};
}

// In the order of _mm512_reduce_add_ps.
INLINE float sum_of(Floats v) {
    const __m256 eight = _mm256_add_ps(v.high, v.low);
    const __m128 four = _mm_add_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = _mm_add_ps(_mm_movehl_ps(four, four), four);
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

INLINE float largest_of(Floats v) {
    const __m256 eight = _mm256_max_ps(v.high, v.low);
    const __m128 four = _mm_max_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = _mm_max_ps(_mm_movehl_ps(four, four), four);
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

INLINE Mask mask_of(__m256 low, __m256 high) {
    return (Mask)(_mm256_movemask_ps(low) | _mm256_movemask_ps(high) << 8);
}

// The lanes that are NaN.
INLINE Mask not_numbers(Floats v) {
    return mask_of(_mm256_cmp_ps(v.low, v.low, _CMP_UNORD_Q),
                   _mm256_cmp_ps(v.high, v.high, _CMP_UNORD_Q));
}

INLINE Mask equal_lanes(Floats a, Floats b) {
    return mask_of(_mm256_cmp_ps(a.low, b.low, _CMP_EQ_OQ),
                   _mm256_cmp_ps(a.high, b.high, _CMP_EQ_OQ));
}

INLINE int any_greater(Floats a, Floats b) {
    return mask_of(_mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ),
                   _mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ))
           != 0;
}

INLINE void transpose_eight(__m256 *v) {
    __m256 w[8];
    UNROLL
    for (int i = 0; i < 8; i += 2) {
        w[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
        w[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
    }
    UNROLL
    for (int i = 0; i < 8; i += 4) UNROLL
    for (int j = 0; j < 2; j++) {
        const __m256d x = (__m256d)w[i + j], y = (__m256d)w[i + j + 2];
        v[i + 2 * j] = (__m256)_mm256_unpacklo_pd(x, y);
        v[i + 2 * j + 1] = (__m256)_mm256_unpackhi_pd(x, y);
    }
    UNROLL
    for (int i = 0; i < 4; i++) {
        w[i] = _mm256_permute2f128_ps(v[i], v[i + 4], 0x20);
        w[i + 4] = _mm256_permute2f128_ps(v[i], v[i + 4], 0x31);
    }
    memcpy(v, w, sizeof w);
}

// Transposes 16 vectors.
INLINE void transpose(Floats *v) {
    __m256 of[4][8];
    UNROLL
    for (int i = 0; i < 16; i++) of[i / 8][i % 8] = v[i].low, of[2 + i / 8][i % 8] = v[i].high;
    UNROLL
    for (int part = 0; part < 4; part++) transpose_eight(of[part]);
    UNROLL
    for (int i = 0; i < 16; i++) v[i] = (Floats){of[i / 8 * 2][i % 8], of[i / 8 * 2 + 1][i % 8]};
}

// --- dot products -------------------------------------------------------------------------------

typedef __m256 Sums;  // of one dot product

// Keeps a vector in its register: GCC would load it from memory for each use, and loads per cycle
// would limit the multiplications.
INLINE __m256 held(__m256 v) {
    __asm__("" : "+x"(v));
    return v;
}

INLINE Sums no_sums(void) { return _mm256_setzero_ps(); }

// The sums of eight vectors' lanes, in their order. All take the same tree.
INLINE __m256 sum_eight(const Sums *v) {
    __m256 a[4], b[2];
    UNROLL
    for (int i = 0; i < 4; i++)
        a[i] = _mm256_add_ps(_mm256_unpacklo_ps(v[2 * i], v[2 * i + 1]),
                             _mm256_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    UNROLL
    for (int i = 0; i < 2; i++) {
        __m256d x = (__m256d)a[2 * i], y = (__m256d)a[2 * i + 1];
        b[i] = _mm256_add_ps((__m256)_mm256_unpacklo_pd(x, y), (__m256)_mm256_unpackhi_pd(x, y));
    }
    return _mm256_add_ps(_mm256_permute2f128_ps(b[0], b[1], 0x20),
                         _mm256_permute2f128_ps(b[0], b[1], 0x31));
}

// The same of up to 16.
INLINE Floats sum_lanes(const Sums *v, int count) {
    return (Floats){sum_eight(v), count > 8 ? sum_eight(v + 8) : _mm256_setzero_ps()};
}
