// Linear layers whose weights are codes: `weight = scale * (value - zero) - offset`, where a scale
// holds for one output and a group of inputs, and `value` is the code or a table's entry for it.
//
// A block of a row's inputs becomes integers X times a power of two: 15 bits with the sign for
// bfloat16 models, 23 for float32 models. So a block's products are summed as integers, exactly and
// in any order. Then the sum is rounded to float32, scaled, and added to those of earlier blocks.
// Every instruction set has the same bits.
//
// 64 outputs are side by side in memory, a panel, with four inputs of each output together: a lane
// of a vector is an output. Integers X are stored as digits, in the form that the instructions
// need; that, and the products, are in the headers named codes_.

enum {
    PANEL = 64,
    VECTORS = PANEL / 16,  // of a panel's outputs
    STEP = 4,              // inputs of an output that are together
    MOST_BLOCK = 128,      // inputs
    DIGIT_ROWS = 264,      // whose digits are made together
    SUM_ROWS = 66,         // whose sums stay in the first-level cache
    AHEAD_BYTES = 4096,    // at least, from codes to those that are prefetched
};

enum { FLOATS, HALVES, BFLOATS, EXPONENTS, MULTIPLES };

// Numbers for outputs and groups, [panels, groups, PANEL] of a kind. MULTIPLES are signed bytes
// times factors, [panels, count, PANEL], each for `repeats` groups.
typedef struct {
    const void *values, *factors;
    long kind, factor_kind, repeats, count;
} Scales;

struct Codes {
    const uint8_t *codes;    // [panels, inputs / 4, PANEL, 4], or [panels, inputs / 8, PANEL, 4]
    const uint8_t *table;    // values of the 16 codes of 4 bits, or NULL
    Scales scales, offsets;  // offsets.values: perhaps NULL
    long bits, inputs, block, groups;
    long repeats;  // blocks in a group
    long zero;
    long coarse;  // activations of 8 bits
    long floats;  // codes are e4m3: bits 8, no offsets
};

// The codes of a block: bytes, or two in a byte, perhaps with a table of their values. Or values,
// unpacked.
enum { BYTES, HALF_BYTES, LOOKED_UP, VALUES };

// Bits of X without sign, of a block's largest number: less one.
#ifdef FLOAT32
enum { FRACTION = 21 };
#else
enum { FRACTION = 13 };
#endif

// A block of a panel.
typedef struct {
    const uint8_t *codes, *table;
    long steps;  // of four inputs
    long zero;
    int form, has_offsets;
    Floats scales[VECTORS], offsets[VECTORS];
} Block;

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && !defined(AVX2)
#include "codes_vnni.h"
#else
#include "codes_avx2.h"
#endif
#include "codes_floats.h"

// Rows as digits, or as operands: of each block, all rows.
typedef struct {
    char *digits;
    float *units;     // [blocks, rows]: the value of X = 1
    int32_t *totals;  // [blocks, rows]: sums of X
    long rows, block, inputs, coarse, floats;
    int planes;  // digits of an X
    int width;   // bytes of an input
    int tiled;   // for tiles
} Digits;

#ifdef TILES
#include "codes_tiles.h"
#else
INLINE int in_tiles(long rows) { return (void)rows, 0; }
#endif

// Those of a block, at the block's number times rows, plus the row.
INLINE void *digits_at(const Digits *d, long at) { return d->digits + at * d->block * d->width; }

INLINE Floats load_kind(const void *p, long kind, long at) {
    switch (kind) {
    case FLOATS: return load_floats((const float *)p + at);
    case HALVES: return load_halves((const uint16_t *)p + at);
    case BFLOATS: return load_bfloats((const uint16_t *)p + at);
    case EXPONENTS: return load_exponents((const uint8_t *)p + at);
    default: return load_bytes((const int8_t *)p + at);
    }
}

// Numbers of a panel's outputs in one group.
INLINE void load_scales(const Scales *s, long panel, long groups, long group, Floats *to) {
    const long at = (panel * groups + group) * PANEL;
    const long factor = (panel * s->count + group / s->repeats) * PANEL;
    UNROLL
    for (int v = 0; v < VECTORS; v++) {
        to[v] = load_kind(s->values, s->kind, at + v * 16);
        if (s->kind == MULTIPLES)
            to[v] = multiply(to[v], load_kind(s->factors, s->factor_kind, factor + v * 16));
    }
}

INLINE float power_of_two(long n) {
    const uint32_t bits = (uint32_t)(n + 127) << 23;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

// Digits, unit and total of a row's block: `count` numbers, and zeros up to the block's end. A
// block with NaN or infinity has the unit NaN. Numbers below 2^-100 count as multiples of the unit
// of 2^-100.
static void lay_out_digits(const number *x, long count, const Digits *d, Digit *to, float *unit,
                           int32_t *total) {
    uint32_t bits = largest_bits(x, count);
    const uint32_t least = 27u << 23, infinite = 255u << 23;  // 2^-100
    if (bits >= infinite) {
        memset(to, 0, d->block * d->width);
        *unit = NAN, *total = 0;
        return;
    }
    if (bits < least) bits = least;
    float factor;
    if (d->coarse) {
        float most;
        memcpy(&most, &bits, 4);
        factor = 127.0f / most, *unit = most / 127.0f;
    } else {
        const long shift = FRACTION + 127 - (long)(bits >> 23);
        factor = power_of_two(shift), *unit = power_of_two(-shift);
    }
    const Floats times = spread(factor);
    Integers totals = no_integers();
    for (long i = 0; i < d->block; i += 16, to += 16 * d->planes) {
        const Floats v = multiply(load_wide_some(x + i, first(count - i)), times);
        const Integers digits = to_integers(v);
        totals = add_integers(totals, digits);
#ifdef TILES
        if (d->tiled && d->planes > 1) {
            put_planes(to - i * d->planes, digits, i, d->block);
            continue;
        }
#endif
        Digit some[16 * PLANES], *const place = i + 16 <= d->block ? to : some;
        if (d->planes == 1)
            put_digits(place, digits, 1);
        else
            put_digits(place, digits, PLANES);
        if (place == some) memcpy(to, some, 8 * d->width);
    }
    *total = sum_of_integers(totals);
}

static void lay_out_row(const Digits *d, const number *x, long inputs, long row) {
    x += row * inputs;
    for (long i = 0, at = row; i < d->inputs; i += d->block, at += d->rows) {
        const long count = inputs - i < d->block ? inputs - i : d->block;
        Operand *const operands = digits_at(d, at);
        if (!d->floats)
            lay_out_digits(x + i, count, d, digits_at(d, at), d->units + at, d->totals + at);
        else
            for (long j = 0; j < d->block; j++)
                operands[j] = j < count ? operand_of(wide(x[i + j])) : 0;
    }
}

// Adds products of up to SUM_ROWS rows with a block to `sums`, [rows, PANEL]. room: for values of
// codes. ahead: memory to prefetch as much of as the block has codes.
static void multiply_codes(Block *b, const Digits *d, long at, long rows, float *sums, Value *room,
                           const uint8_t *ahead) {
#ifdef TILES
    if (d->tiled) {
        unpack_values(b, room);
        add_tiles(b, digits_at(d, at), d->block, d->planes, rows, d->units + at, d->totals + at,
                  sums);
        return;
    }
#endif
    const long most = tile_rows_of(d->planes);
    // A line in each step of the first tiles. Later ones prefetch the next tile's digits.
    long lines = b->form == HALF_BYTES || b->form == LOOKED_UP ? VECTORS / 2 : VECTORS;
    if (rows > DIRECT_ROWS) {
        unpack_values(b, room);
        b->form = VALUES;
    }
    for (long row = 0, some; row < rows; row += some, at += some) {
        const long left = rows - row;
        some = left < most ? left : left == most + 1 ? (most + 1) / 2 : most;
        const char *next = (const char *)ahead;
        long advance = rows <= DIRECT_ROWS ? VECTORS * 64 : 64;
        if (lines-- > 0)
            ahead += advance * b->steps;
        else
            next = digits_at(d, at + some), advance = some * d->block * d->width / b->steps;
        add_tile(some, d->planes, b, digits_at(d, at), d->units + at, d->totals + at,
                 sums + row * PANEL, next, advance);
    }
}

// Products of a panel's outputs with rows from `row` on, [rows, PANEL].
static void multiply_panel(const Codes *c, long panel, const Digits *d, long row, long rows,
                           float *sums) {
    union {
        Value values[MOST_BLOCK * PANEL];
        Operand operands[MOST_BLOCK * PANEL];
    } room;
    const long bytes = c->block * PANEL * c->bits / 8, blocks = c->inputs / c->block;
    const long apart = (AHEAD_BYTES + bytes - 1) / bytes * bytes;
    const uint8_t *codes = c->codes + panel * blocks * bytes;
    memset(sums, 0, rows * PANEL * sizeof(float));
    Block b = {.table = c->table, .steps = c->block / STEP, .zero = c->zero};
    b.has_offsets = c->offsets.values != NULL;
    Operand table[256];
    if (c->floats) lay_out_table(table);
#ifdef TILES
    if (d->tiled) shape_code_tiles(c->block);
#endif
    for (long block = 0; block < blocks; block++, codes += bytes) {
        const long group = block / c->repeats;
        load_scales(&c->scales, panel, c->groups, group, b.scales);
        if (c->floats) {
            unpack_operands(codes, b.steps, table, room.operands);
            const Operand *x = digits_at(d, block * d->rows + row);
            multiply_floats(room.operands, c->block, x, rows, b.scales, sums);
            continue;
        }
        if (b.has_offsets) load_scales(&c->offsets, panel, c->groups, group, b.offsets);
        b.codes = codes, b.form = c->bits == 8 ? BYTES : c->table ? LOOKED_UP : HALF_BYTES;
        multiply_codes(&b, d, block * d->rows + row, rows, sums, room.values, codes + apart);
    }
#ifdef TILES
    if (d->tiled) _tile_release();
#endif
}

INLINE long panels_of(long outputs) { return (outputs + PANEL - 1) / PANEL; }

// Digits of rows for one part, in memory from `to` on, which moves past them. Without `to`, only
// the memory is counted.
static Digits place_digits(const Codes *c, long rows, char **to) {
    const long blocks = c->inputs / c->block, line = 64;
    Digits d = {.rows = rows, .block = c->block, .inputs = c->inputs, .coarse = c->coarse};
    d.floats = c->floats;
    d.planes = c->coarse ? 1 : PLANES;
    d.width = c->floats ? sizeof(Operand) : d.planes * sizeof(Digit);
    d.tiled = !c->floats && in_tiles(rows);
    d.digits = *to;
    // A tile reads 16 rows, whatever stands in those that there are not.
    *to += (rows * c->inputs + (d.tiled ? 15 * c->block : 0)) * d.width;
    d.units = (float *)*to;
    *to += blocks * rows * sizeof(float);
    d.totals = (int32_t *)*to;
    *to += (blocks * rows * sizeof(int32_t) + line) / line * line;
    return d;
}

INLINE int same_digits(const Codes *a, const Codes *b) {
    return a->block == b->block && a->inputs == b->inputs && a->coarse == b->coarse
           && a->floats == b->floats;
}

// Digits of rows for each part: those of an earlier part, if they are the same. Returns the bytes
// that they take.
static long place_all_digits(const Linear *l, long rows, char *memory, Digits *all) {
    char *to = memory;
    for (long part = 0; part < l->parts; part++) {
        long same = 0;
        while (!same_digits(l->codes[same], l->codes[part])) same++;
        all[part] = same < part ? all[same] : place_digits(l->codes[part], rows, &to);
    }
    return to - memory;
}

static void lay_out_all(const Linear *l, const Digits *all, const number *x, long row) {
    for (long part = 0; part < l->parts; part++)
        if (!part || all[part].digits > all[part - 1].digits)
            lay_out_row(all + part, x, l->inputs, row);
}

// Outputs of a panel of a part, for rows from `row` on.
static void put_panel(const Linear *l, long part, long panel, const Digits *all, long row,
                      long rows, Target to) {
    float sums[SUM_ROWS * PANEL], other[SUM_ROWS * PANEL];
    const int gated = l->kind >= GATED_SILU;
    multiply_panel(l->codes[part], panel, all + part, row, rows, sums);
    if (gated) multiply_panel(l->codes[1], panel, all + 1, row, rows, other);
    const float *ups = gated ? other : sums;
    for (long i = 0; i < rows; i++) {
        const Target here = at_row(to, row + i, output_width(l));
        for (long v = 0; v < VECTORS; v++) {
            const long column = panel * PANEL + v * 16, at = i * PANEL + v * 16;
            const Mask mask = first(l->outputs[part] - column);
            if (mask)
                put_outputs(l, part, load_floats(sums + at), load_floats(ups + at), here, column,
                            mask);
        }
    }
}

// Panels of all parts are counted through.
static void codes_by_team(const Linear *l, const number *x, long rows, const number *added,
                          void *out) {
    const long parts = output_parts(l), few = 2;
    long panels = 0, bytes = 0;
    for (long part = 0; part < parts; part++) panels += panels_of(l->outputs[part]);
    for (long part = 0; part < l->parts; part++)
        bytes +=
            panels_of(l->outputs[part]) * PANEL * l->codes[part]->inputs * l->codes[part]->bits / 8;
    const Chunks chunks = chunks_for(panels, bytes / panels, 1);
    Digits all[4];
    for (long from = 0; from < rows; from += DIGIT_ROWS) {
        const long some = rows - from < DIGIT_ROWS ? rows - from : DIGIT_ROWS;
        const long unit = in_tiles(some) ? 16 : 6, most = SUM_ROWS / unit * unit;
        const long pieces = (some + most - 1) / most, width = l->inputs;
        const long piece = (some + unit * pieces - 1) / (unit * pieces) * unit;
        char *memory = NULL;
        if (some <= few) {
            memory = memory_for(place_all_digits(l, some, NULL, all));
            place_all_digits(l, some, memory, all);
            for (long row = 0; row < some; row++) lay_out_all(l, all, x + from * width, row);
        } else {
#pragma omp single copyprivate(memory)
            memory = memory_for(place_all_digits(l, some, NULL, all));
            place_all_digits(l, some, memory, all);
#pragma omp for
            for (long row = 0; row < some; row++) lay_out_all(l, all, x + from * width, row);
        }
#pragma omp for schedule(dynamic)
        for (long item = 0; item < pieces * chunks.count; item++) {
            const long row = item / chunks.count * piece;
            const long count = some - row < piece ? some - row : piece;
            const long start = item % chunks.count * chunks.size, stop = start + chunks.size;
            for (long part = 0, base = 0, offset = 0; part < parts; part++) {
                const long own = panels_of(l->outputs[part]);
                const Target to = at_row(target_of(l, out, added, offset), from, output_width(l));
                for (long panel = larger(start - base, 0); panel < own && panel < stop - base;
                     panel++)
                    put_panel(l, part, panel, all, row, count, to);
                base += own, offset += l->outputs[part];
            }
        }
    }
}
