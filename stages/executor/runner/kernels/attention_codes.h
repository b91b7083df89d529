// Keys and values as codes of 8 bits, with a scale for each token and head. kv_codes.py has the
// arithmetic in torch; the bits are the same.

enum { INT8_CODES = 1, FP8_CODES = 2 };

INLINE uint32_t bits_of(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}

INLINE float from_bits(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

// The nearest whole number from -127 to 127: adding 1.5 * 2^23 leaves it in the lowest bits.
INLINE uint8_t int8_of(float f) { return (uint8_t)bits_of(f + 12582912.0f); }

// The nearest float8_e4m3fn of a number up to 448.
INLINE uint8_t fp8_of(float f) {
    const uint32_t bits = bits_of(f) & 0x7fffffff, sign = bits_of(f) >> 24 & 0x80;
    // Below the least normal one, 2^-6, codes count multiples of 2^-9.
    const uint32_t small = bits_of(from_bits(bits) + 16384.0f) & 0xff;
    const uint32_t normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
    return (uint8_t)(sign | (bits < 121u << 23 ? small : normal));
}

// Codes of one head's numbers, and their scale: the largest magnitude by the largest code, rounded
// up to bfloat16; NaN if a number is not finite.
INLINE void pack(int codes, const number *from, long width, uint8_t *to, uint16_t *scale) {
    Floats most = zeros();
    Mask broken = 0;
    for (long i = 0; i < width; i += 16) {
        const Floats v = load_wide(from + i);
        broken |= not_numbers(v);
        most = maximum(most, maximum(v, subtract(zeros(), v)));
    }
    const float largest = largest_of(most), exact = largest / (codes == INT8_CODES ? 127 : 448);
    uint32_t bits = (bits_of(exact > 0x1p-100f ? exact : 0x1p-100f) + 0xffff) >> 16;
    if (broken || largest > 0x1.fffffep127f) bits = 0x7fc0;
    *scale = (uint16_t)bits;
    const Floats divisor = spread(from_bits(bits << 16));
    for (long i = 0; i < width; i += 16) {
        float some[16];
        store_floats(some, divide(load_wide(from + i), divisor));
        for (int j = 0; j < 16; j++)
            to[i + j] = codes == INT8_CODES ? int8_of(some[j]) : fp8_of(some[j]);
    }
}

// Packs a token's keys or values, all heads, into its slot.
static void put_heads(const Attention *a, const number *from, long width, int64_t slot, void *to,
                      uint16_t *scales) {
    for (long head = 0; head < a->kv_heads; head++, from += width) {
        const long place = slot * a->kv_heads + head;
        uint8_t *codes = (uint8_t *)to + place * width;
        if (a->codes == INT8_CODES)
            pack(INT8_CODES, from, width, codes, scales + place);
        else
            pack(FP8_CODES, from, width, codes, scales + place);
    }
}

// Bytes with their sign extended as floats: of fp8 the sign, the exponent, which lacks 120, and the
// fraction are shifted to their places in a float.
#ifdef AVX2

INLINE __m256 widen_codes(int codes, const uint8_t *p) {
    const __m256i wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
    if (codes == INT8_CODES) return _mm256_cvtepi32_ps(wide);
    const __m256i parts = _mm256_set1_epi32((int)0x87f00000);
    return (__m256)_mm256_and_si256(_mm256_slli_epi32(wide, 20), parts);
}

INLINE Floats load_codes(int codes, const uint8_t *p) {
    return (Floats){widen_codes(codes, p), widen_codes(codes, p + 8)};
}

#else

INLINE Floats load_codes(int codes, const uint8_t *p) {
    const __m512i wide = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
    if (codes == INT8_CODES) return _mm512_cvtepi32_ps(wide);
    const __m512i parts = _mm512_set1_epi32((int)0x87f00000);
    return (__m512)_mm512_and_si512(_mm512_slli_epi32(wide, 20), parts);
}

#endif

// The factor of a head's codes.
INLINE Floats factor_of(int codes, uint16_t scale) {
    const float f = from_bits((uint32_t)scale << 16);
    return spread(codes == FP8_CODES ? f * 0x1p120f : f);
}

// 16 numbers as floats, or zeros.
INLINE Floats read_codes(int codes, const uint8_t *p, Floats factor, int there) {
    return there ? multiply(load_codes(codes, p), factor) : zeros();
}

#if !defined(AVX2) && !defined(FLOAT32)

// 32 floats as numbers in one vector. A load of 64 bytes can't take them from two stores that are
// on their way to the cache: it would wait for both, and these for all loads before them.
INLINE __m512i narrow_both(Floats x, Floats y) { return (__m512i)_mm512_cvtne2ps_pbh(y, x); }

#endif

// The numbers of a head: codes times their scale.
INLINE void unpack(int codes, const void *from, const uint16_t *scales, long place, long width,
                   number *to) {
    const uint8_t *p = (const uint8_t *)from + place * width;
    const Floats factor = factor_of(codes, scales[place]);
    for (long i = 0; i < width; i += 32) {
        const Floats x = read_codes(codes, p + i, factor, 1);
        const Floats y = read_codes(codes, p + i + 16, factor, i + 16 < width);
#if !defined(AVX2) && !defined(FLOAT32)
        if (i + 16 < width) {
            _mm512_storeu_si512(to + i, narrow_both(x, y));
            continue;
        }
#endif
        store_narrow(to + i, x);
        if (i + 16 < width) store_narrow(to + i + 16, y);
    }
}

// Lays up to 32 numbers of two positions, from `i` on, side by side, as lay_out_values does.
INLINE void lay_out_two(int codes, const void *from, const uint16_t *scales, const long *places,
                        long width, long i, Operand *to) {
    Floats x[2], y[2];
    UNROLL
    for (int j = 0; j < 2; j++) {
        const uint8_t *p = (const uint8_t *)from + places[j] * width + i;
        const Floats factor = factor_of(codes, scales[places[j]]);
        x[j] = read_codes(codes, p, factor, 1);
        y[j] = read_codes(codes, p + 16, factor, i + 16 < width);
    }
#if defined(AVX2) || defined(FLOAT32)
    UNROLL
    for (int j = 0; j < 2; j++, to += 32) {
        store_floats(to, rounded(x[j]));
        store_floats(to + 16, rounded(y[j]));
    }
#else
    const __m512i one = narrow_both(x[0], y[0]), other = narrow_both(x[1], y[1]);
    _mm512_storeu_si512(to, _mm512_unpacklo_epi16(one, other));
    _mm512_storeu_si512(to + 32, _mm512_unpackhi_epi16(one, other));
#endif
}
