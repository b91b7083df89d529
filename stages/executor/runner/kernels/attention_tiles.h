// Products of attention by tiles: scores of 16 rows and 16 positions, and sums of 16 rows and 32
// numbers of the values.

enum {
    GRAIN = TILE,      // heads that cost as much as one
    TILE_ROWS = TILE,  // rows that are multiplied together
};

INLINE long tile_of(long rows) {
    (void)rows;
    return TILE;
}

INLINE void begin_attention(void) { shape_tiles(TILE, TILE); }

INLINE void end_attention(void) { _tile_release(); }

// Adds 16 rows of weights times `count` rows of 32 numbers, in the layout of add_values, to sums.
INLINE void add_rows(float *sums, long line, const number *weights, long stride,
                     const number *values, long count) {
    _tile_loadd(0, sums, line);
    _tile_loadd(1, sums + TILE, line);
    for (long j = 0; j < count; j += WIDTH, values += WIDTH * 32) {
        _tile_loadd(4, weights + j, stride * sizeof(number));
        _tile_loadd(6, values, 2 * LINE);
        _tile_loadd(7, values + WIDTH, 2 * LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, sums, line);
    _tile_stored(1, sums + TILE, line);
}

// Scores of 16 rows and the first `used` positions of a chunk. They are sums of the keys' numbers
// of 32 positions, weighted by the queries.
static void score(const Rows *r, long row, long some, long used) {
    const long width = r->key_width;
    (void)some;
    memset(r->scores, 0, TILE * CHUNK * sizeof(float));
    written();
    for (long from = 0; from < used; from += 32)
        add_rows(r->scores + from, CHUNK * sizeof(float), r->queries + row * width, width,
                 r->keys + from * width, width);
}

// Adds a chunk's values to the sums of all rows. Invisible positions have weight 0.
static void add_chunk(const Rows *r, long chunk) {
    written();
    for (long row = 0; row < r->rows; row += TILE) {
        const long some = r->rows - row < TILE ? r->rows - row : TILE;
        const long used = used_by_any(r, row, some, chunk);
        for (long part = 0; part < r->padded && used; part += 32)
            add_rows(r->sums + row * r->padded + part, r->padded * sizeof(float),
                     r->weights + row * CHUNK, CHUNK, r->values + part * CHUNK, used);
    }
}
