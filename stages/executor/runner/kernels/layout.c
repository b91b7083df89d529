// Codes of weights between rows of outputs, as formats store them, and the panels that kernels
// read.

#include <stdint.h>
#include <string.h>

#ifdef _OPENMP
#define OVER_PANELS _Pragma("omp parallel for")
#else
#define OVER_PANELS
#endif

enum {
    PANEL = 64,  // outputs side by side
    STEP = 4,    // inputs of one output that stay together
    CHUNK = 64,  // inputs at a time: a block of a panel stays in the first cache
};

static inline uint32_t step_at(const uint8_t *codes) {
    uint32_t step;
    memcpy(&step, codes, STEP);
    return step;
}

static inline long least(long a, long b) { return a < b ? a : b; }

// Packs [outputs, inputs], a byte each, to [panels, padded * bits / 32, PANEL] of four bytes.
void pack_codes(const uint8_t *codes, long outputs, long inputs, long padded, long bits,
                uint32_t *packed) {
    const long steps = padded * bits / 32, count = CHUNK * bits / 32;
    OVER_PANELS
    for (long first = 0; first < outputs; first += PANEL) {
        const long lanes = least(PANEL, outputs - first);
        uint32_t *to = packed + first * steps;
        uint8_t block[PANEL][CHUNK] = {0};
        for (long start = 0; start < padded; start += CHUNK, to += count * PANEL) {
            const long width = least(CHUNK, inputs - start);
            if (width < CHUNK) memset(block, 0, sizeof block);
            for (long lane = 0; lane < lanes && width > 0; lane++)
                memcpy(block[lane], codes + (first + lane) * inputs + start, width);
            const long there = least(count, (padded - start) * bits / 32);
            for (long step = 0; step < there; step++)
                for (long lane = 0; lane < PANEL; lane++) {
                    const uint8_t *from = block[lane] + step * (32 / bits);
                    to[step * PANEL + lane] =
                        bits == 8 ? step_at(from) : step_at(from) | step_at(from + STEP) << 4;
                }
        }
    }
}

// Unpacks weights to [outputs, inputs]: scale * (value - zero) - offset, each step rounded.
//
// `values`: of the 256 codes, NULL for the codes themselves. `scales`, and `offsets` unless NULL:
// [outputs, groups].
void unpack_codes(const uint32_t *packed, long outputs, long inputs, long padded, long bits,
                  const float *values, float zero, const float *scales, const float *offsets,
                  long groups, long group, float *weights) {
    const long steps = padded * bits / 32, count = CHUNK * bits / 32;
    OVER_PANELS
    for (long first = 0; first < outputs; first += PANEL) {
        const long lanes = least(PANEL, outputs - first);
        const uint32_t *from = packed + first * steps;
        uint8_t block[PANEL][CHUNK];
        for (long start = 0; start < inputs; start += CHUNK, from += count * PANEL) {
            const long there = least(count, (padded - start) * bits / 32);
            for (long lane = 0; lane < lanes; lane++)
                for (long step = 0; step < there; step++) {
                    const uint32_t codes = from[step * PANEL + lane];
                    if (bits == 8) {
                        memcpy(block[lane] + step * STEP, &codes, STEP);
                    } else {
                        const uint32_t halves[2] = {codes & 0x0f0f0f0f, codes >> 4 & 0x0f0f0f0f};
                        memcpy(block[lane] + step * 2 * STEP, halves, 2 * STEP);
                    }
                }
            const long stop = least(start + CHUNK, inputs);
            for (long lane = 0; lane < lanes; lane++) {
                const long row = first + lane;
                float *to = weights + row * inputs;
                for (long i = start, end; i < stop; i = end) {
                    const long place = i / group;
                    end = least(stop, (place + 1) * group);
                    const float scale = scales[row * groups + place];
                    const float offset = offsets ? offsets[row * groups + place] : 0;
                    const uint8_t *own = block[lane] - start;
                    if (values)
                        for (long j = i; j < end; j++) to[j] = scale * (values[own[j]] - zero);
                    else
                        for (long j = i; j < end; j++) to[j] = scale * ((float)own[j] - zero);
                    if (offsets)
                        for (long j = i; j < end; j++) to[j] -= offset;
                }
            }
        }
    }
}
