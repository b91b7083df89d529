// Products of codes with AVX2: one instruction adds two products of 16 bits in each lane, and with
// AVX-VNNI adds them to the sum too. Values of a step's first and third inputs lie together, and
// those of the second and fourth, since a shift or a mask widens these from bytes. Digits are of 16
// bits with sign: X, or for float32 models X = 2048 * first + second.

typedef int16_t Digit;
typedef int16_t Value;
typedef struct {
    __m256i low, high;
} Integers;

#ifdef FLOAT32
enum { PLANES = 2 };
#else
enum { PLANES = 1 };
#endif
enum {
    EIGHTS = PANEL / 8,  // vectors of a panel's outputs
    DIRECT_ROWS = 1,     // multiplied by codes without unpacking these
    LOW_BITS = 11,       // of X in the last of two digits
};

INLINE Integers no_integers(void) {
    return (Integers){_mm256_setzero_si256(), _mm256_setzero_si256()};
}

INLINE Integers add_integers(Integers a, Integers b) {
    return (Integers){_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}

INLINE int32_t sum_of_integers(Integers v) {
    int32_t each[8], sum = 0;
    _mm256_storeu_si256((__m256i *)each, _mm256_add_epi32(v.low, v.high));
    for (int i = 0; i < 8; i++) sum += each[i];
    return sum;
}

INLINE __m256i half_of(Floats v, int half) {
#ifdef AVX2
    return _mm256_cvtps_epi32(half ? v.high : v.low);
#else
    return _mm256_cvtps_epi32(half ? (__m256)_mm512_extractf64x4_pd((__m512d)v, 1)
                                   : _mm512_castps512_ps256(v));
#endif
}

INLINE Integers to_integers(Floats v) { return (Integers){half_of(v, 0), half_of(v, 1)}; }

// The bits of the largest number without its sign, as a float: infinity and NaN are the largest.
INLINE uint32_t largest_bits(const number *x, long count) {
    uint32_t largest = 0;
    for (long i = 0; i < count; i++) {
        const float v = wide(x[i]);
        uint32_t bits;
        memcpy(&bits, &v, 4);
        bits &= INT32_MAX;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

// Digits of eight inputs.
INLINE void put_eight(Digit *to, __m256i x, int planes) {
    for (int plane = planes - 1; plane >= 0; plane--) {
        __m256i digit = x;
        if (plane > 0) {
            digit = _mm256_srai_epi32(_mm256_slli_epi32(x, 32 - LOW_BITS), 32 - LOW_BITS);
            x = _mm256_srai_epi32(_mm256_sub_epi32(x, digit), LOW_BITS);
        }
        // Of each four neighbours the first and third, then the others.
        __m256i words = _mm256_packs_epi32(digit, digit);
        words = _mm256_shufflelo_epi16(words, 0xd8);
        for (int i = 0; i < 2; i++) {
            const __m128i four =
                i ? _mm256_extracti128_si256(words, 1) : _mm256_castsi256_si128(words);
            _mm_storel_epi64((__m128i *)(to + (i * planes + plane) * 4), four);
        }
    }
}

// Digits of 16 inputs, of each four inputs the first digits, then the second ones.
INLINE void put_digits(Digit *to, Integers x, int planes) {
    put_eight(to, x.low, planes);
    put_eight(to + 8 * planes, x.high, planes);
}

// Rows of a tile.
INLINE long tile_rows_of(int planes) {
    (void)planes;
    return 2;
}

// Values of eight outputs, of the first and third inputs or of the others.
typedef struct {
    __m256i of[2];
} Pairs;

INLINE __m256i words_and(__m256i v, int mask) {
    return _mm256_and_si256(v, _mm256_set1_epi16(mask));
}

INLINE Pairs pairs_of(__m256i bytes) {
    return (Pairs){{words_and(bytes, 255), _mm256_srli_epi16(bytes, 8)}};
}

// Those of 32 bytes: of four inputs, or of the first or last four of eight.
INLINE Pairs values_of(int form, __m256i codes, int half, __m256i table) {
    if (form == BYTES) return pairs_of(codes);
    const __m256i some = words_and(half ? _mm256_srli_epi16(codes, 4) : codes, 0x0f0f);
    return pairs_of(form == LOOKED_UP ? _mm256_shuffle_epi8(table, some) : some);
}

INLINE __m256i table_of(const Block *b) {
    if (!b->table) return _mm256_setzero_si256();
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)b->table));
}

INLINE void unpack_form(int form, const Block *b, Value *to) {
    const int halves = form == BYTES ? 1 : 2;
    const __m256i table = table_of(b);
    const uint8_t *codes = b->codes;
    for (long i = 0; i < b->steps; i += halves)
        for (int v = 0; v < EIGHTS; v++, codes += 32) {
            const __m256i some = _mm256_loadu_si256((const __m256i *)codes);
            UNROLL
            for (int half = 0; half < halves; half++) {
                const Pairs pairs = values_of(form, some, half, table);
                __m256i *place = (__m256i *)(to + ((i + half) * EIGHTS + v) * 32);
                _mm256_storeu_si256(place, pairs.of[0]);
                _mm256_storeu_si256(place + 1, pairs.of[1]);
            }
        }
}

// Makes the codes of a block values, in `room`.
INLINE void unpack_values(Block *b, Value *room) {
    switch (b->form) {
    case BYTES: unpack_form(BYTES, b, room); break;
    case HALF_BYTES: unpack_form(HALF_BYTES, b, room); break;
    default: unpack_form(LOOKED_UP, b, room); break;
    }
    b->codes = (const uint8_t *)room;
}

INLINE __m256i add_pairs(__m256i sums, __m256i a, __m256i b) {
#ifdef __AVXVNNI__
    return _mm256_dpwssd_avx_epi32(sums, a, b);
#else
    return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
#endif
}

// A sum of products from those of its digits, as floats, rounded once. less: with two digits, the
// zero's products.
INLINE __m256 joined(int planes, const __m256i *sums, double less) {
    if (planes == 1) return _mm256_cvtepi32_ps(sums[0]);
    const __m256d factor = _mm256_set1_pd(1 << LOW_BITS), rest = _mm256_set1_pd(less);
    __m128 halves[2];
    UNROLL
    for (int i = 0; i < 2; i++) {
        const __m128i high =
            i ? _mm256_extracti128_si256(sums[0], 1) : _mm256_castsi256_si128(sums[0]);
        const __m128i low =
            i ? _mm256_extracti128_si256(sums[1], 1) : _mm256_castsi256_si128(sums[1]);
        const __m256d both = _mm256_sub_pd(_mm256_cvtepi32_pd(low), rest);
        halves[i] = _mm256_cvtpd_ps(_mm256_fmadd_pd(_mm256_cvtepi32_pd(high), factor, both));
    }
    return _mm256_insertf128_ps(_mm256_castps128_ps256(halves[0]), halves[1], 1);
}

// Adds a block's products of some rows and outputs to `sums`, and prefetches some lines with each
// step.
INLINE void add_outputs(int rows, int planes, int form, const Block *b, int from, int count,
                        const Digit *digits, const float *units, const int32_t *totals, float *sums,
                        const char *ahead, long advance) {
    const int halves = form == HALF_BYTES || form == LOOKED_UP ? 2 : 1, lines = rows > 1 ? 1 : 4;
    const long apart = b->steps * 4 * planes, width = form == VALUES ? 64 : 32;
    const __m256i table = form == LOOKED_UP ? table_of(b) : _mm256_setzero_si256();
    const uint8_t *codes = b->codes + from * width;
    __m256i products[2][EIGHTS][PLANES];
    UNROLL
    for (int a = 0; a < rows; a++) UNROLL
    for (int v = 0; v < count; v++) UNROLL
    for (int plane = 0; plane < planes; plane++)
        // Less the zero's products; with two digits, these may not fit.
        products[a][v][plane] = _mm256_set1_epi32(planes == 1 ? -b->zero * totals[a] : 0);
    for (long i = 0; i < b->steps; i += halves) {
        UNROLL
        for (int half = 0; half < halves; half++, digits += 4 * planes) UNROLL
        for (int v = 0; v < count; v++) {
            const __m256i *place = (const __m256i *)(codes + v * width);
            Pairs values;
            if (form == VALUES)
                values = (Pairs){{_mm256_loadu_si256(place), _mm256_loadu_si256(place + 1)}};
            else
                values = values_of(form, _mm256_loadu_si256(place), half, table);
            UNROLL
            for (int a = 0; a < rows; a++) UNROLL
            for (int plane = 0; plane < planes; plane++) UNROLL
            for (int pair = 0; pair < 2; pair++) {
                int32_t two;
                memcpy(&two, digits + a * apart + plane * 4 + pair * 2, 4);
                products[a][v][plane] =
                    add_pairs(products[a][v][plane], values.of[pair], _mm256_set1_epi32(two));
            }
        }
        for (int line = 0; line < lines; line++) _mm_prefetch(ahead + line * 64, _MM_HINT_T0);
        ahead += advance;
        codes += EIGHTS * width;
    }
    UNROLL
    for (int a = 0; a < rows; a++) UNROLL
    for (int v = 0; v < count; v++) {
        const float *scale = (const float *)b->scales + (from + v) * 8;
        const float *offset = (const float *)b->offsets + (from + v) * 8;
        const __m256 unit = _mm256_set1_ps(units[a]), total = _mm256_set1_ps(totals[a]);
        float *to = sums + a * PANEL + (from + v) * 8;
        const __m256 sum = joined(planes, products[a][v], (double)b->zero * totals[a]);
        const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(scale), unit);
        __m256 found = _mm256_fmadd_ps(sum, scaled, _mm256_loadu_ps(to));
        if (b->has_offsets)
            found = _mm256_fnmadd_ps(total, _mm256_mul_ps(_mm256_loadu_ps(offset), unit), found);
        _mm256_storeu_ps(to, found);
    }
}

// The same of all outputs, as many at a time as there are registers.
INLINE void add_form(int rows, int planes, int form, const Block *b, const Digit *digits,
                     const float *units, const int32_t *totals, float *sums, const char *ahead,
                     long advance) {
    const int count = EIGHTS / (rows * planes);
    for (int from = 0; from < EIGHTS; from += count, advance = 0)
        add_outputs(rows, planes, form, b, from, count, digits, units, totals, sums, ahead,
                    advance);
}

INLINE void add_tile(long rows, int planes, const Block *b, const Digit *digits, const float *units,
                     const int32_t *totals, float *sums, const char *ahead, long advance) {
#define ADD(rows, planes, form) \
    add_form(rows, planes, form, b, digits, units, totals, sums, ahead, advance)
#define ADD_ROWS(planes)                                    \
    if (rows == 2) {                                        \
        ADD(2, planes, VALUES);                             \
    } else {                                                \
        switch (b->form) {                                  \
        case BYTES: ADD(1, planes, BYTES); break;           \
        case HALF_BYTES: ADD(1, planes, HALF_BYTES); break; \
        case LOOKED_UP: ADD(1, planes, LOOKED_UP); break;   \
        default: ADD(1, planes, VALUES); break;             \
        }                                                   \
    }
    if (planes == 1) {
        ADD_ROWS(1)
    } else {
        ADD_ROWS(PLANES)
    }
#undef ADD_ROWS
#undef ADD
}
