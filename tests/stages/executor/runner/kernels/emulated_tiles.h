// AMX's instructions by loops, for processors without them. Included before all else.

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig emulated_config
#define _tile_release emulated_release
#define _tile_loadd emulated_load
#define _tile_stored emulated_store
#define _tile_zero emulated_zero
#define _tile_dpbf16ps emulated_bfloat16
#define _tile_dpbsud emulated_bytes

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} EmulatedShapes;

static _Thread_local EmulatedShapes emulated_shapes;
static _Thread_local uint8_t emulated_tiles[8][16][64];

static inline void emulated_config(const void *shapes) {
    memcpy(&emulated_shapes, shapes, sizeof emulated_shapes);
    memset(emulated_tiles, 0, sizeof emulated_tiles);
}

static inline void emulated_release(void) { memset(&emulated_shapes, 0, sizeof emulated_shapes); }

static inline void emulated_zero(int tile) {
    memset(emulated_tiles[tile], 0, sizeof emulated_tiles[tile]);
}

static inline void emulated_load(int tile, const void *from, long apart) {
    emulated_zero(tile);
    for (int row = 0; row < emulated_shapes.rows[tile]; row++)
        memcpy(emulated_tiles[tile][row], (const char *)from + row * apart,
               emulated_shapes.bytes[tile]);
}

static inline void emulated_store(int tile, void *to, long apart) {
    for (int row = 0; row < emulated_shapes.rows[tile]; row++)
        memcpy((char *)to + row * apart, emulated_tiles[tile][row], emulated_shapes.bytes[tile]);
}

// A product is of no known shape unless it was configured: such sums would be garbage on a processor.
static inline int emulated_steps(int sums, int first, int second) {
    const EmulatedShapes *s = &emulated_shapes;
    if (s->rows[sums] != s->rows[first] || s->bytes[sums] != s->bytes[second]
        || s->bytes[first] != s->rows[second] * 4)
        __builtin_trap();
    return s->rows[second];
}

static inline void emulated_bytes(int sums, int first, int second) {
    const int steps = emulated_steps(sums, first, second);
    for (int row = 0; row < emulated_shapes.rows[sums]; row++)
        for (int column = 0; column < emulated_shapes.bytes[sums] / 4; column++) {
            int32_t sum;
            memcpy(&sum, emulated_tiles[sums][row] + column * 4, 4);
            for (int i = 0; i < steps * 4; i++)
                sum += (int8_t)emulated_tiles[first][row][i]
                       * emulated_tiles[second][i / 4][column * 4 + i % 4];
            memcpy(emulated_tiles[sums][row] + column * 4, &sum, 4);
        }
}

static inline float emulated_wide(const uint8_t *number) {
    uint16_t half;
    memcpy(&half, number, 2);
    const uint32_t bits = (uint32_t)half << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline void emulated_bfloat16(int sums, int first, int second) {
    const int steps = emulated_steps(sums, first, second);
    for (int row = 0; row < emulated_shapes.rows[sums]; row++)
        for (int column = 0; column < emulated_shapes.bytes[sums] / 4; column++) {
            float sum;
            memcpy(&sum, emulated_tiles[sums][row] + column * 4, 4);
            for (int i = 0; i < steps * 2; i++)
                sum += emulated_wide(emulated_tiles[first][row] + i * 2)
                       * emulated_wide(emulated_tiles[second][i / 2] + column * 4 + i % 2 * 2);
            memcpy(emulated_tiles[sums][row] + column * 4, &sum, 4);
        }
}
