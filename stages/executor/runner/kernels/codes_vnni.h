// Products of codes with AVX512-VNNI: one instruction adds four products of bytes in each lane.
// Digits are bytes with sign: X = 256 * (256 * first + second) + third, or without the first ones.

typedef int8_t Digit;
typedef uint8_t Value;
typedef __m512i Integers;

#ifdef FLOAT32
enum { PLANES = 3 };
#else
enum { PLANES = 2 };
#endif
enum { DIRECT_ROWS = 2 };  // multiplied by codes without unpacking these

INLINE Integers no_integers(void) { return _mm512_setzero_si512(); }

INLINE Integers add_integers(Integers a, Integers b) { return _mm512_add_epi32(a, b); }

INLINE int32_t sum_of_integers(Integers v) { return _mm512_reduce_add_epi32(v); }

INLINE Integers to_integers(Floats v) { return _mm512_cvtps_epi32(v); }

// The bits of the largest number without its sign, as a float: infinity and NaN are the largest.
INLINE uint32_t largest_bits(const number *x, long count) {
    __m512i largest = no_integers();
#ifdef FLOAT32
    const __m512i mask = _mm512_set1_epi32(INT32_MAX);
    for (long i = 0; i < count; i += 16) {
        const __m512i some = _mm512_maskz_loadu_epi32(first(count - i), x + i);
        largest = _mm512_max_epu32(largest, _mm512_and_si512(some, mask));
    }
    return _mm512_reduce_max_epu32(largest);
#else
    const __m512i mask = _mm512_set1_epi16(INT16_MAX);
    for (long i = 0; i < count; i += 32) {
        const __m512i some = (__m512i)load(x + i, 0, lanes(count - i));
        largest = _mm512_max_epu16(largest, _mm512_and_si512(some, mask));
    }
    const __m512i odd = _mm512_slli_epi32(_mm512_srli_epi32(largest, 16), 16);
    return _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_slli_epi32(largest, 16), odd));
#endif
}

// Digits of 16 inputs, of each four inputs the first digits, then the second ones.
INLINE void put_digits(Digit *to, Integers x, int planes) {
    __m128i digits[PLANES];
    for (int plane = planes - 1; plane >= 0; plane--) {
        digits[plane] = _mm512_cvtepi32_epi8(x);
        // Rounded, so that the last digit has a sign.
        x = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8);
    }
    if (planes == 1) {
        _mm_storeu_si128((__m128i *)to, digits[0]);
    } else if (planes == 2) {
        _mm_storeu_si128((__m128i *)to, _mm_unpacklo_epi32(digits[0], digits[1]));
        _mm_storeu_si128((__m128i *)(to + 16), _mm_unpackhi_epi32(digits[0], digits[1]));
    } else {
        for (int plane = 0; plane < planes; plane++) UNROLL
        for (int i = 0; i < 4; i++)
            memcpy(to + (i * planes + plane) * 4, (int32_t *)(digits + plane) + i, 4);
    }
}

// Rows of a tile, so that its sums stay in registers.
INLINE long tile_rows_of(int planes) { return planes == 1 ? 6 : planes == 2 ? 3 : 2; }

INLINE __m512i low_halves(__m512i v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }

// Values of 64 codes: of all, or of the first or second half of those in 64 bytes.
INLINE __m512i values_of(int form, __m512i codes, int half, __m512i table) {
    if (form == BYTES || form == VALUES) return codes;
    codes = low_halves(half ? _mm512_srli_epi16(codes, 4) : codes);
    return form == LOOKED_UP ? _mm512_shuffle_epi8(table, codes) : codes;
}

INLINE __m512i table_of(const Block *b) {
    if (!b->table) return _mm512_setzero_si512();
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)b->table));
}

INLINE void unpack_form(int form, const Block *b, Value *to) {
    const __m512i table = table_of(b);
    const uint8_t *codes = b->codes;
    for (long i = 0; i < b->steps; i += 2, to += 2 * 4 * PANEL, codes += 4 * PANEL) UNROLL
    for (int v = 0; v < VECTORS; v++) {
        const __m512i some = _mm512_loadu_si512(codes + v * 64);
        _mm512_storeu_si512(to + v * 64, values_of(form, some, 0, table));
        _mm512_storeu_si512(to + 4 * PANEL + v * 64, values_of(form, some, 1, table));
    }
}

// Makes the codes of a block values, in `room` unless they are.
INLINE void unpack_values(Block *b, Value *room) {
    if (b->form == BYTES) return;
    if (b->form == HALF_BYTES)
        unpack_form(HALF_BYTES, b, room);
    else
        unpack_form(LOOKED_UP, b, room);
    b->codes = room;
}

// A sum of products from those of its digits, as floats, rounded once. less: with three digits, the
// zero's products.
INLINE Floats joined(int planes, const __m512i *sums, double less) {
    if (planes == 1) return _mm512_cvtepi32_ps(sums[0]);
    const __m512i *low = sums + planes - 2;
    const __m512i both = _mm512_add_epi32(_mm512_slli_epi32(low[0], 8), low[1]);
    if (planes == 2) return _mm512_cvtepi32_ps(both);
    const __m512d factor = _mm512_set1_pd(65536.0);
    __m256 halves[2];
    UNROLL
    for (int i = 0; i < 2; i++) {
        const __m512d high = _mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(sums[0], i));
        __m512d rest = _mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(both, i));
        rest = _mm512_sub_pd(rest, _mm512_set1_pd(less));
        halves[i] = _mm512_cvtpd_ps(_mm512_fmadd_pd(high, factor, rest));
    }
    return (__m512)_mm512_insertf64x4(_mm512_castpd256_pd512((__m256d)halves[0]),
                                      (__m256d)halves[1], 1);
}

// In assembly: GCC would move sums between registers, and run out of them.
INLINE __m512i add_four(__m512i sums, __m512i values, __m512i x) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(values), "v"(x));
    return sums;
}

INLINE __m512i held_bytes(__m512i v) { return (__m512i)held((__m512)v); }

// A step of a tile: the products of 256 bytes, of four inputs, or of eight if they are half bytes.
INLINE void add_step(int rows, int planes, int form, const uint8_t *codes, const Digit *digits,
                     long apart, __m512i table, __m512i (*sums)[VECTORS][PLANES]) {
    const int halves = form == HALF_BYTES || form == LOOKED_UP ? 2 : 1;
    UNROLL
    for (int half = 0; half < halves; half++) {
        __m512i values[VECTORS];
        UNROLL
        for (int v = 0; v < VECTORS; v++)
            values[v] =
                held_bytes(values_of(form, _mm512_loadu_si512(codes + v * 64), half, table));
        UNROLL
        for (int a = 0; a < rows; a++) UNROLL
        for (int plane = 0; plane < planes; plane++) {
            int32_t four;
            memcpy(&four, digits + a * apart + (half * planes + plane) * 4, 4);
            const __m512i x = held_bytes(_mm512_set1_epi32(four));
            UNROLL
            for (int v = 0; v < VECTORS; v++)
                sums[a][v][plane] = add_four(sums[a][v][plane], values[v], x);
        }
    }
}

// Scales times a unit. Units are powers of two, except for activations of 8 bits, and these have an
// instruction that doesn't take the multipliers' time.
INLINE Floats times_unit(int rows, int planes, Floats scales, Floats unit) {
    if (rows < 3 || planes == 1) return multiply(scales, unit);
    return _mm512_scalef_ps(scales, _mm512_getexp_ps(unit));
}

// Adds a block's products of some rows to `sums`, and prefetches some lines with each step.
INLINE void add_form(int rows, int planes, int form, const Block *b, const Digit *digits,
                     const float *units, const int32_t *totals, float *sums, const char *ahead,
                     long advance) {
    const int halves = form == HALF_BYTES || form == LOOKED_UP ? 2 : 1;
    const int lines = rows < 3 ? 4 : 1;
    const long steps = b->steps / halves, apart = b->steps * 4 * planes;
    const __m512i table = form == LOOKED_UP ? table_of(b) : _mm512_setzero_si512();
    __m512i products[6][VECTORS][PLANES];
    UNROLL
    for (int a = 0; a < rows; a++) UNROLL
    for (int v = 0; v < VECTORS; v++) UNROLL
    for (int plane = 0; plane < planes; plane++) {
        // Less the zero's products; with three digits, these may not fit.
        const int32_t start = plane == planes - 1 && planes < 3 ? -b->zero * totals[a] : 0;
        products[a][v][plane] = _mm512_set1_epi32(start);
    }
    const int has_offsets = b->has_offsets;
    const uint8_t *codes = b->codes;
    for (long i = 0; i < steps; i++) {
        add_step(rows, planes, form, codes, digits, apart, table, products);
        for (int line = 0; line < lines; line++) _mm_prefetch(ahead + line * 64, _MM_HINT_T0);
        ahead += advance;
        codes += 4 * PANEL, digits += 4 * planes * halves;
    }
    UNROLL
    for (int a = 0; a < rows; a++) {
        const Floats unit = spread(units[a]), total = spread((float)totals[a]);
        const double less = (double)b->zero * totals[a];
        UNROLL
        for (int v = 0; v < VECTORS; v++) {
            float *to = sums + a * PANEL + v * 16;
            Floats sum = load_floats(to), scale = times_unit(rows, planes, b->scales[v], unit);
            sum = multiply_add(joined(planes, products[a][v], less), scale, sum);
            if (has_offsets) sum = multiply_subtract(total, multiply(b->offsets[v], unit), sum);
            store_floats(to, sum);
        }
    }
}

#define ADD(rows, planes, form) \
    add_form(rows, planes, form, b, digits, units, totals, sums, ahead, advance)

// Likewise, of three rows or more. A function of its own, since GCC would otherwise keep scales in
// registers during the steps, and sums in memory.
static __attribute__((noinline)) void add_large_tile(long rows, int planes, const Block *b,
                                                     const Digit *digits, const float *units,
                                                     const int32_t *totals, float *sums,
                                                     const char *ahead, long advance) {
#ifndef FLOAT32
    if (planes == 2) {
        ADD(3, 2, VALUES);
        return;
    }
#endif
    (void)planes;
    switch (rows) {
    case 3: ADD(3, 1, VALUES); break;
    case 4: ADD(4, 1, VALUES); break;
    case 5: ADD(5, 1, VALUES); break;
    default: ADD(6, 1, VALUES); break;
    }
}

// Likewise.
INLINE void add_tile(long rows, int planes, const Block *b, const Digit *digits, const float *units,
                     const int32_t *totals, float *sums, const char *ahead, long advance) {
#define ADD_FORMS(rows, planes)                            \
    switch (b->form) {                                     \
    case HALF_BYTES: ADD(rows, planes, HALF_BYTES); break; \
    case LOOKED_UP: ADD(rows, planes, LOOKED_UP); break;   \
    default: ADD(rows, planes, VALUES); break;             \
    }
#define ADD_ROWS(planes)     \
    if (rows == 1) {         \
        ADD_FORMS(1, planes) \
    } else {                 \
        ADD_FORMS(2, planes) \
    }
    if (rows > 2) {
        add_large_tile(rows, planes, b, digits, units, totals, sums, ahead, advance);
    } else if (planes == 1) {
        ADD_ROWS(1)
    } else {
        ADD_ROWS(PLANES)
    }
#undef ADD_ROWS
#undef ADD_FORMS
}
#undef ADD
