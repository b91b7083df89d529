// Products of codes that are floating-point numbers themselves, e4m3: their values become operands
// of the instructions for dense layers. Sums of a block are float32, in the order of inputs, or
// with AVX512-BF16 of pairs of inputs.

enum {
    PAIR = sizeof(float) / sizeof(Operand),  // inputs in a lane
    LANES = sizeof(Sums) / sizeof(float),
    COLUMNS = 4,  // vectors of a tile
};
#ifdef AVX2
enum { FLOAT_ROWS = 3 };  // of a tile
#else
enum { FLOAT_ROWS = 6 };
#endif

INLINE Operand operand_of(float f) {
#if defined(AVX2) || defined(FLOAT32)
    return f;
#else
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits >> 16;
#endif
}

INLINE Numbers spread_pair(const Operand *p) {
#if defined(AVX2)
    return _mm256_set1_ps(*p);
#elif defined(FLOAT32)
    return _mm512_set1_ps(*p);
#else
    int32_t two;
    memcpy(&two, p, 4);
    return (Numbers)_mm512_set1_epi32(two);
#endif
}

// The operand of each code.
static void lay_out_table(Operand *table) {
    for (uint32_t code = 0; code < 256; code++) {
        uint32_t bits = (code & 127) << 20;
        float f;
        memcpy(&f, &bits, 4);
        f = (code & 127) == 127 ? NAN : f * 0x1p120f;
        table[code] = operand_of(code < 128 ? f : -f);
    }
}

// Operands of a block's codes, [inputs / PAIR, PANEL, PAIR].
static void unpack_operands(const uint8_t *codes, long steps, const Operand *table, Operand *to) {
#if defined(__AVX512VBMI__) && !defined(AVX2) && !defined(FLOAT32)
    // Bytes of the operands without sign, looked up by seven bits of a code.
    __m512i low[2], high[2];
    for (int i = 0; i < 2; i++) {
        const __m512i some = _mm512_loadu_si512(table + i * 64);
        const __m512i more = _mm512_loadu_si512(table + i * 64 + 32);
        low[i] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(some)),
                                    _mm512_cvtepi16_epi8(more), 1);
        high[i] = _mm512_inserti64x4(
            _mm512_castsi256_si512(_mm512_cvtepi16_epi8(_mm512_srli_epi16(some, 8))),
            _mm512_cvtepi16_epi8(_mm512_srli_epi16(more, 8)), 1);
    }
    // The first pairs of four outputs, then their second ones.
    const __m512i order =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    const __m512i sign = _mm512_set1_epi8(-128);
    for (long i = 0; i < steps; i++, to += 4 * PANEL)
        for (int v = 0; v < VECTORS; v++, codes += 64) {
            const __m512i some = _mm512_shuffle_epi8(_mm512_loadu_si512(codes), order);
            const __m512i lows = _mm512_permutex2var_epi8(low[0], some, low[1]);
            __m512i highs = _mm512_permutex2var_epi8(high[0], some, high[1]);
            highs = _mm512_or_si512(highs, _mm512_and_si512(some, sign));
            _mm512_storeu_si512(to + v * 32, _mm512_unpacklo_epi8(lows, highs));
            _mm512_storeu_si512(to + 2 * PANEL + v * 32, _mm512_unpackhi_epi8(lows, highs));
        }
#else
    for (long i = 0; i < steps; i++)
        for (long output = 0; output < PANEL; output++)
            for (long j = 0; j < STEP; j++) {
                const long pair = (i * STEP + j) / PAIR;
                to[(pair * PANEL + output) * PAIR + j % PAIR] = table[*codes++];
            }
#endif
}

// Adds scaled products of some rows, `apart` operands from one to the next, to `sums`.
INLINE void add_float_tile(int rows, const Operand *values, long inputs, const Operand *x,
                           const Floats *scales, float *sums) {
    float products[FLOAT_ROWS][PANEL];
    for (long from = 0; from < PANEL; from += COLUMNS * LANES) {
        Sums tile[FLOAT_ROWS][COLUMNS];
        UNROLL
        for (int a = 0; a < rows; a++) UNROLL
        for (int v = 0; v < COLUMNS; v++) tile[a][v] = no_sums();
        const Operand *some = values + from * PAIR;
        for (long i = 0; i < inputs; i += PAIR, some += PANEL * PAIR) {
            Numbers each[FLOAT_ROWS];
            UNROLL
            for (int a = 0; a < rows; a++) each[a] = spread_pair(x + a * inputs + i);
            UNROLL
            for (int v = 0; v < COLUMNS; v++) {
                const Numbers value = load_operands(some + v * LANES * PAIR, 0, ALL_LANES);
                UNROLL
                for (int a = 0; a < rows; a++) tile[a][v] = add_product(tile[a][v], each[a], value);
            }
        }
        UNROLL
        for (int a = 0; a < rows; a++) UNROLL
        for (int v = 0; v < COLUMNS; v++)
            memcpy(&products[a][from + v * LANES], &tile[a][v], sizeof(Sums));
    }
    for (int a = 0; a < rows; a++)
        for (int v = 0; v < VECTORS; v++) {
            float *to = sums + a * PANEL + v * 16;
            const Floats some = load_floats(products[a] + v * 16);
            store_floats(to, multiply_add(some, scales[v], load_floats(to)));
        }
}

// Adds a block's products of some rows to `sums`.
static void multiply_floats(const Operand *values, long inputs, const Operand *x, long rows,
                            const Floats *scales, float *sums) {
#define ADD(rows) add_float_tile(rows, values, inputs, x, scales, sums)
    for (long row = 0, some; row < rows; row += some) {
        const long left = rows - row;
        some = left >= FLOAT_ROWS ? FLOAT_ROWS : left < 3 ? left : 3;
        switch (some) {
        case 1: ADD(1); break;
        case 2: ADD(2); break;
        case 3: ADD(3); break;
        default: ADD(FLOAT_ROWS); break;
        }
        x += some * inputs, sums += some * PANEL;
    }
#undef ADD
}
