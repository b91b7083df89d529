// Products of codes with AMX: one instruction multiplies 16 rows of up to 64 digits by the values
// of as many inputs of 16 outputs. Both are exact, so the bits are those of other instructions.
//
// A tile reads its rows at one distance: the digits of a block of a row are plane by plane.

enum { LEAST_TILE_ROWS = 6 };  // fewer take less time without tiles

INLINE int in_tiles(long rows) { return rows >= LEAST_TILE_ROWS; }

// Inputs of a tile: a block has one or two.
INLINE long tile_inputs(long block) { return block <= 64 ? block : block / 2; }

// Configures this thread's tiles: 0 to 3 for sums, 4 and 5 for digits, 6 and 7 for values. Release
// them afterwards.
INLINE void shape_code_tiles(long block) {
    const long inputs = tile_inputs(block);
    TileShapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        const int digits = i == 4 || i == 5, values = i == 6 || i == 7;
        shapes.bytes[i] = digits ? inputs : LINE;
        shapes.rows[i] = values ? inputs / STEP : TILE;
    }
    _tile_loadconfig(&shapes);
}

// Digits of up to 16 inputs from the i-th of a block on.
INLINE void put_planes(Digit *block, Integers x, long i, long inputs) {
    const __mmask16 mask = first(inputs - i);
    for (int plane = PLANES - 1; plane >= 0; plane--) {
        _mm_mask_storeu_epi8(block + plane * inputs + i, mask, _mm512_cvtepi32_epi8(x));
        // Rounded, so that the last digit has a sign.
        x = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8);
    }
}

// Products of 16 rows with 32 outputs from vector `v` on: the sums of each digit.
INLINE void multiply_tiles(const uint8_t *values, const Digit *digits, long block, int planes,
                           int32_t (*products)[PLANES][SUMS]) {
    const long inputs = tile_inputs(block), apart = block * planes;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long i = 0; i < block; i += inputs) {
        const uint8_t *own = values + i * PANEL;
        _tile_loadd(4, digits + i, apart);
        _tile_loadd(6, own, STEP * PANEL);
        _tile_loadd(7, own + LINE, STEP * PANEL);
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(2, 4, 7);
        if (planes > 1) {
            _tile_loadd(5, digits + block + i, apart);
            _tile_dpbsud(1, 5, 6);
            _tile_dpbsud(3, 5, 7);
        }
    }
    _tile_stored(0, products[0][0], LINE);
    _tile_stored(2, products[1][0], LINE);
    if (planes > 1) _tile_stored(1, products[0][1], LINE);
    if (planes > 1) _tile_stored(3, products[1][1], LINE);
}

// Adds a block's products of some rows to `sums`. Digits of rows after them are read, too.
static void add_tiles(const Block *b, const Digit *digits, long block, int planes, long rows,
                      const float *units, const int32_t *totals, float *sums) {
    int32_t products[2][PLANES][SUMS];
    written();
    for (long row = 0; row < rows; row += TILE)
        for (int v = 0; v < VECTORS; v += 2) {
            multiply_tiles(b->codes + v * LINE, digits + row * block * planes, block, planes,
                           products);
            for (long a = row; a < rows && a < row + TILE; a++) {
                const Floats unit = spread(units[a]), total = spread((float)totals[a]);
                for (int i = 0; i < 2; i++) {
                    const long place = (a - row) * TILE;
                    const __m512i less = _mm512_set1_epi32(b->zero * totals[a]);
                    const __m512i last = _mm512_loadu_si512(products[i][planes - 1] + place);
                    __m512i own[PLANES] = {_mm512_loadu_si512(products[i][0] + place)};
                    own[planes - 1] = _mm512_sub_epi32(last, less);
                    float *to = sums + a * PANEL + (v + i) * 16;
                    Floats sum = multiply_add(joined(planes, own, 0),
                                              multiply(b->scales[v + i], unit), load_floats(to));
                    if (b->has_offsets)
                        sum = multiply_subtract(total, multiply(b->offsets[v + i], unit), sum);
                    store_floats(to, sum);
                }
            }
        }
}
