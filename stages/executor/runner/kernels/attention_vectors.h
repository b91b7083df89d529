// Products of attention by vectors.

enum {
    GRAIN = 1,               // heads that cost as much as one
    TILE_ROWS = MOST_ADDED,  // rows that are multiplied together, at most
};

INLINE void begin_attention(void) {}

INLINE void end_attention(void) {}

// Rows that are multiplied together, of so many.
INLINE long tile_of(long rows) {
    const long tiles = (rows + MOST_ADDED - 1) / MOST_ADDED;
    return (rows + tiles - 1) / tiles;
}

// add_values of up to MOST_ADDED rows and a width, in steps of 32.
INLINE void add_rows(long rows, long columns, float *sums, long width, const Operand *weights,
                     long stride, const Operand *values, long apart, long positions, int fresh) {
#define ADD(rows, vectors) \
    add_values(rows, vectors, sums, width, weights, stride, values, apart, positions, fresh)
#define ADD_SOME(vectors)                                \
    switch (rows) {                                      \
    case 1: ADD(1, vectors); break;                      \
    case 2: ADD(2, vectors); break;                      \
    case 3: ADD(3, vectors); break;                      \
    case 4: ADD(MOST_ADDED < 4 ? 3 : 4, vectors); break; \
    case 5: ADD(MOST_ADDED < 5 ? 3 : 5, vectors); break; \
    default: ADD(MOST_ADDED, vectors); break;            \
    }
    for (; MOST_ADDED > 3 && columns >= 64; columns -= 64, sums += 64, values += 2 * apart)
        ADD_SOME(4)
    for (; columns > 0; columns -= 32, sums += 32, values += apart) ADD_SOME(2)
}

// Scores of some rows and the first `used` positions of a chunk. They are sums of the keys' numbers
// of 32 positions, weighted by the queries; those of 64 numbers are added up, which rounds less.
static void score(const Rows *r, long row, long some, long used) {
    const long width = r->key_width;
    for (long i = 0; i < width; i += 64)
        add_rows(some, used, r->scores, CHUNK, r->queries + row * width + i, width,
                 r->keys + i * 32, width * 32, width - i < 64 ? width - i : 64, i == 0);
}

// Adds a chunk's values to the sums of all rows. Invisible positions have weight 0.
static void add_chunk(const Rows *r, long chunk) {
    const long tile = tile_of(r->rows);
    for (long row = 0; row < r->rows; row += tile) {
        const long some = r->rows - row < tile ? r->rows - row : tile;
        add_rows(some, r->padded, r->sums + row * r->padded, r->padded, r->weights + row * CHUNK,
                 CHUNK, r->values, CHUNK * 32, used_by_any(r, row, some, chunk), 0);
    }
}
