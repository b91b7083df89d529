// AMX: tiles of 16 rows of 64 bytes. One instruction multiplies 16 rows of a first operand, 32
// numbers of each, with the same numbers of 16 rows of a second one, and adds to 16 by 16 sums. The
// first operand is read row by row from memory. The second one needs, for each pair of numbers, the
// pairs of all 16 rows side by side.
//
// A sum depends on its two rows alone: products of 32 numbers at a time are added in order.

#include <sys/syscall.h>
#include <unistd.h>

enum {
    TILE = 16,                 // rows of a tile
    TILE_SIZE = TILE * WIDTH,  // numbers in it
    SUMS = TILE * TILE,
    LINE = WIDTH * sizeof(number),
};

// Requests permission for tiles from Linux; returns whether it was granted.
int allow_tiles(void) {
    const long request = 0x1023, data_of_tiles = 18;  // ARCH_REQ_XCOMP_PERM of arch_prctl(2)
    return syscall(SYS_arch_prctl, request, data_of_tiles) == 0;
}

// The processor's format.
typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} TileShapes;

// Configures this thread's tiles: 0 to 3 for sums, 4 and 5 for `rows` rows of the first operand, 6
// and 7 for `columns` rows of the second. Release them afterwards.
INLINE void shape_tiles(long rows, long columns) {
    TileShapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        const int first = i == 4 || i == 5, second = i == 6 || i == 7;
        shapes.bytes[i] = first ? LINE : columns * sizeof(float);
        shapes.rows[i] = second ? TILE : rows;
    }
    _tile_loadconfig(&shapes);
}

// Barrier between writing memory and loading tiles from it: GCC doesn't see the load.
INLINE void written(void) { __asm__ volatile("" ::: "memory"); }

// Lays out up to WIDTH numbers of up to 16 rows as a second operand, padded to a whole tile.
INLINE void lay_out_rows(const number *const *rows, long present, long offset, long count,
                         number *to) {
    Floats v[TILE];
    UNROLL
    for (int i = 0; i < TILE; i++)
        v[i] = i < present ? (Floats)load(rows[i] + offset, 0, lanes(count)) : zeros();
    transpose(v);
    UNROLL
    for (int i = 0; i < TILE; i++) store_floats((float *)(to + i * WIDTH), v[i]);
}
