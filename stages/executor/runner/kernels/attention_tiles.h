// Products of attention by tiles: scores of 16 rows and 16 positions, and sums of 16 rows and 32
// numbers of the values.

enum {
    KEYS_AS_NUMBERS = 0,  // laid out as such, row by row
    GATHERED = 32,        // positions per gather: those of a tile of weights
    GRAIN = TILE,         // rows that are multiplied together
};

INLINE void begin_attention(void) { shape_tiles(TILE, TILE); }

INLINE void end_attention(void) { _tile_release(); }

INLINE void lay_out_keys(const number *const *keys, long width, number *to) {
    for (long i = 0; i < width; i += WIDTH, to += TILE_SIZE)
        lay_out_rows(keys, TILE, i, width - i, to);
}

// The number of positions from `chunk` on that any of 16 rows sees.
INLINE long used_by_tile(const Rows *r, long tile, long chunk) {
    long used = 0;
    for (long row = tile; row < tile + TILE && row < r->rows; row++)
        used = larger(used, used_by(r, row, chunk));
    return used;
}

// Scores of all rows and 16 positions of a chunk, from `offset` on, unless none of 16 rows sees
// them.
static void score(const Rows *r, long chunk, long offset) {
    written();
    const long width = r->key_width;
    for (long row = 0; row < r->rows; row += TILE) {
        if (used_by_tile(r, row, chunk) <= offset) continue;
        const number *queries = r->queries + row * width, *keys = r->keys;
        _tile_zero(0);
        for (long i = 0; i < width; i += WIDTH, keys += TILE_SIZE) {
            _tile_loadd(4, queries + i, width * sizeof(number));
            _tile_loadd(6, keys, LINE);
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, r->scores + row * CHUNK + offset, CHUNK * sizeof(float));
    }
}

// Adds a chunk's values to the sums of all rows. Invisible positions have weight 0.
static void add_chunk(const Rows *r, long chunk) {
    written();
    const long line = r->padded * sizeof(float), pair = 2 * WIDTH;
    for (long row = 0; row < r->rows; row += TILE) {
        const long used = used_by_tile(r, row, chunk);
        const number *weights = (const number *)(r->scores + row * CHUNK);
        if (!used) continue;
        for (long part = 0; part < r->padded; part += 32) {
            float *sums = r->sums + row * r->padded + part;
            const number *values = r->values + part * CHUNK;
            _tile_loadd(0, sums, line);
            _tile_loadd(1, sums + TILE, line);
            for (long j = 0; j < used; j += WIDTH, values += WIDTH / 2 * pair) {
                _tile_loadd(4, weights + j, CHUNK * sizeof(float));
                _tile_loadd(6, values, pair * sizeof(number));
                _tile_loadd(7, values + WIDTH, pair * sizeof(number));
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
            }
            _tile_stored(0, sums, line);
            _tile_stored(1, sums + TILE, line);
        }
    }
}
