// Linear layers by tiles: weights are the first operand, in the model's layout; the rows, which are
// smaller, are laid out.

enum {
    BLOCK_BYTES = 1280 << 10,  // see block_of
    LONG = 2048,     // inputs of weights that the processor fetches early enough by itself
    PIECE = 256,     // inputs that are multiplied with all rows before the next ones
    MOST_APART = 8,  // outputs from one row of a tile of weights to the next
};

// Laid-out rows, 16 in a tile of all inputs.
typedef struct {
    const number *tiles;
    long line;   // bytes of a pair's numbers
    long apart;  // numbers from one tile to the next
    long count;  // of rows
} LaidOut;

// Outputs that are computed together: one or two times 16 times `apart`. A tile of weights has
// every `apart`th of 16 times as many. So each of its rows begins a long run of memory that the
// next tiles continue, and hardware prefetching works.
typedef struct {
    const number *weights[2];
    long first[2];         // the outputs that these are for
    long inputs, outputs;  // numbers in a row of weights, and rows in a tile of them
    long apart, two;
    const number *next[2];  // weights of the next product
} Group;

// clang-format off
#define ADD_PRODUCTS(weights, others, stride)                   \
    _tile_loadd(6, x, rows->line);                              \
    if (two_rows) _tile_loadd(7, x + rows->apart, rows->line);  \
    _tile_loadd(4, weights, stride);                            \
    _tile_dpbf16ps(0, 4, 6);                                    \
    if (two_rows) _tile_dpbf16ps(1, 4, 7);                      \
    if (two) _tile_loadd(5, others, stride);                    \
    if (two) _tile_dpbf16ps(2, 5, 6);                           \
    if (two && two_rows) _tile_dpbf16ps(3, 5, 7);
// clang-format on

// Prefetches during a product: with each step of WIDTH inputs some cache lines, `between` numbers
// apart, and with the next step as many, `advance` numbers further.
typedef struct {
    const number *from[2];
    long lines, between, advance;
} Ahead;

// Sums of a group's tiles of weights, those that begin with its row `from`, with 16 rows or with
// 32, over the inputs from `start` to `stop`: added to earlier sums, unless these are the first.
// x: the first tile of rows. sums: of each tile of weights and rows those of the whole group, in
// the order of its outputs.
INLINE void sum_tiles(int two, int two_rows, const Group *g, long from, long start, long stop,
                      const LaidOut *rows, const number *x, const Ahead *ahead, float *sums) {
    const long k = g->inputs, size = g->apart * SUMS, step = rows->line / sizeof(number) * TILE;
    const number *weights = g->weights[0] + from * k, *others = g->weights[1] + from * k;
    const number *next = ahead->from[0], *other_next = ahead->from[1];
    const long stride = g->apart * k * sizeof(number), spread = g->apart * TILE * sizeof(float);
    sums += from * TILE;
    if (start == 0) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, spread);
        if (two_rows) _tile_loadd(1, sums + size, spread);
        if (two) _tile_loadd(2, sums + 2 * size, spread);
        if (two && two_rows) _tile_loadd(3, sums + 3 * size, spread);
    }
    x += start / WIDTH * step;
    long i = start;
    for (; i + WIDTH <= stop; i += WIDTH, x += step) {
        ADD_PRODUCTS(weights + i, others + i, stride)
        for (long line = 0, at = 0; line < ahead->lines; line++, at += ahead->between) {
            _mm_prefetch((const char *)(next + at), _MM_HINT_T1);
            if (two) _mm_prefetch((const char *)(other_next + at), _MM_HINT_T1);
        }
        next += ahead->advance;
        other_next += ahead->advance;
    }
    if (i < stop) {
        number rest[2][TILE_SIZE];
        for (long j = 0; j < g->outputs; j++)
            for (int which = 0; which <= two; which++) {
                const number *end = g->weights[which] + (from + j * g->apart) * k + i;
                _mm512_storeu_si512(rest[which] + j * WIDTH, (__m512i)load(end, 0, lanes(k - i)));
            }
        written();
        ADD_PRODUCTS(rest[0], rest[1], LINE)
    }
    _tile_stored(0, sums, spread);
    if (two_rows) _tile_stored(1, sums + size, spread);
    if (two) _tile_stored(2, sums + 2 * size, spread);
    if (two && two_rows) _tile_stored(3, sums + 3 * size, spread);
}

// The same of all tiles of a group.
INLINE void sum_group(int two, int two_rows, const Group *g, long start, long stop,
                      const LaidOut *rows, const number *x, const Ahead *ahead, float *sums) {
    for (long from = 0; from < g->apart; from++)
        sum_tiles(two, two_rows, g, from, start, stop, rows, x, ahead, sums);
}

// A tile of sums by rows: each vector has all outputs of one.
INLINE void load_sums(const float *sums, long outputs, __m512 *rows) {
    UNROLL
    for (int i = 0; i < TILE; i++)
        rows[i] = i < outputs ? _mm512_loadu_ps(sums + i * TILE) : _mm512_setzero_ps();
    transpose(rows);
}

// The next group from output `column` on. The last one begins earlier than it should if its tile
// would end too late.
INLINE Group group_of(const Linear *l, long part, long column, long stop, int few) {
    const long k = l->inputs, gated = l->kind >= GATED_SILU, whole = gated ? TILE : 2 * TILE;
    const long left = (stop - column) / whole, most = left < MOST_APART ? left : MOST_APART;
    const long last = larger(l->outputs[part] - TILE, 0);
    Group g = {
        .inputs = k,
        .outputs = last ? TILE : l->outputs[part],
        .apart = few ? larger(most, 1) : 1,
        .two = gated || stop - column > TILE,
    };
    const long next = gated ? column : column + g.apart * TILE;
    g.first[0] = column < last ? column : last;
    g.first[1] = next < last ? next : last;
    for (int i = 0; i < 2; i++) {
        g.weights[i] = l->weight[i && gated ? 1 : part] + g.first[i] * k;
        g.next[i] = g.weights[i] + g.apart * whole * k;
    }
    return g;
}

// Stores a group's outputs from `start` to `stop` of up to 16 rows: others may be there already.
// sums, others: of the first and of the second tile of weights.
INLINE void put_tile(const Linear *l, long part, const Group *g, const float *sums,
                     const float *others, Target to, long rows, long start, long stop) {
    const long width = output_width(l), gated = l->kind >= GATED_SILU;
    for (long i = 0; i < g->apart; i++) {
        const long column = g->first[0] + i * TILE, other = g->first[1] + i * TILE;
        const __mmask16 mask = first(stop - column) & ~first(start - column);
        const __mmask16 other_mask = first(stop - other) & ~first(start + g->apart * TILE - other);
        __m512 products[TILE], second[TILE];
        load_sums(sums + i * SUMS, g->outputs, products);
        if (g->two) load_sums(others + i * SUMS, g->outputs, second);
        for (long row = 0; row < TILE && row < rows; row++) {
            const Target here = at_row(to, row, width);
            put_outputs(l, part, products[row], second[row], here, column, mask);
            if (g->two && !gated)
                put_outputs(l, part, second[row], second[row], here, other, other_mask);
        }
    }
}

// The same of up to 32 rows, with sums as in sum_tiles.
INLINE void put_group(const Linear *l, long part, const Group *g, const float *sums, Target to,
                      long rows, long start, long stop) {
    const long size = g->apart * SUMS, width = output_width(l);
    for (int i = 0; i <= (rows > TILE); i++)
        put_tile(l, part, g, sums + i * size, sums + (2 + i) * size, at_row(to, i * TILE, width),
                 rows - i * TILE, start, stop);
}

// The prefetches while 32 rows from `row` on are multiplied with a group's inputs up to `stop`.
// With 32 rows in all, the next group's weights in order; with more, evenly, the next inputs or
// group.
INLINE Ahead ahead_of(const LaidOut *rows, const Group *g, long row, long stop) {
    const long passes = (rows->count + 2 * TILE - 1) / (2 * TILE);
    const long lines = (TILE + passes - 1) / passes, done = row / (2 * TILE) * lines;
    if (passes == 1) return (Ahead){{g->next[0], g->next[1]}, lines, WIDTH, lines * WIDTH};
    const int same = stop < g->inputs;
    const long at = done * g->inputs + (same ? stop : 0);
    const number *const *from = same ? g->weights : g->next;
    return (Ahead){{from[0] + at, from[1] + at}, done < TILE ? lines : 0, g->inputs, WIDTH};
}

// Outputs `start` to `stop` of some rows.
static void multiply_block(const Linear *l, long part, const LaidOut *rows, Target to, long start,
                           long stop) {
    const long k = l->inputs, width = output_width(l), gated = l->kind >= GATED_SILU;
    // Too few rows: explicit prefetches would be slower than the hardware's.
    const int few = rows->count <= TILE || (rows->count <= 2 * TILE && k >= LONG);
    // Inputs are split so that their weights stay in the first-level cache for all rows.
    const long pieces = rows->count > 2 * TILE ? (k + PIECE - 1) / PIECE : 1;
    const long piece = (k + pieces * WIDTH - 1) / (pieces * WIDTH) * WIDTH;
    const long size = (few ? MOST_APART : 1) * SUMS, tiles = (rows->count + TILE - 1) / TILE;
    float room[2 * size * (pieces > 1 ? tiles + 1 : 2)];
    shape_tiles(l->outputs[part] < TILE ? l->outputs[part] : TILE, rows->line / sizeof(float));
    for (long column = start, taken; column < stop; column += taken) {
        const Group g = group_of(l, part, column, stop, few);
        taken = g.apart * (gated ? TILE : 2 * TILE);
        for (long from = 0, end; from < k; from = end) {
            end = from + piece < k ? from + piece : k;
            const int more = !few && (end < k || column + taken < stop);
            for (long row = 0; row < rows->count; row += 2 * TILE) {
                const Ahead ahead = more ? ahead_of(rows, &g, row, end) : (Ahead){.lines = 0};
                const number *x = rows->tiles + row / TILE * rows->apart;
                float *sums = room + (pieces > 1 ? row / TILE * 2 * size : 0);
                switch (2 * g.two + (rows->count - row > TILE)) {
                case 3: sum_group(1, 1, &g, from, end, rows, x, &ahead, sums); break;
                case 2: sum_group(1, 0, &g, from, end, rows, x, &ahead, sums); break;
                case 1: sum_group(0, 1, &g, from, end, rows, x, &ahead, sums); break;
                default: sum_group(0, 0, &g, from, end, rows, x, &ahead, sums); break;
                }
                if (end == k)
                    put_group(l, part, &g, sums, at_row(to, row, width), rows->count - row, column,
                              stop);
            }
        }
    }
    _tile_release();
}

static void dense_by_team(const Linear *l, const number *x, long rows, const number *added,
                          void *out) {
    const long k = l->inputs, steps = (k + WIDTH - 1) / WIDTH;
    const long width = output_width(l);
    const long block = block_of(l, rows, BLOCK_BYTES, 4 * TILE, 2 * TILE);
    // A single row has the required layout: its pairs in order.
    const int alone = rows == 1 && k % WIDTH == 0;
    number *tiles = NULL;
    if (!alone)
#pragma omp single copyprivate(tiles)
        tiles = memory_for(block * steps * WIDTH * sizeof(number));
    LaidOut laid_out = {tiles, LINE, steps * TILE_SIZE, 0};
    if (alone) laid_out = (LaidOut){x, sizeof(float), 0, 0};
    const Chunks chunks = chunks_of(l, TILE * (l->kind >= GATED_SILU ? 1 : 2));
    for (long from = 0; from < rows; from += block) {
        laid_out.count = from + block < rows ? block : rows - from;
        if (!alone)
#pragma omp for
            for (long item = 0; item < (laid_out.count + TILE - 1) / TILE * steps; item++) {
                const long row = item / steps * TILE, i = item % steps * WIDTH;
                const number *each[TILE];
                for (long j = 0; j < TILE; j++) each[j] = x + (from + row + j) * k;
                lay_out_rows(each, laid_out.count - row, i, k - i, tiles + item * TILE_SIZE);
            }
#pragma omp for schedule(dynamic)
        for (long item = 0; item < chunks.count; item++)
            for (long part = 0; part < output_parts(l); part++) {
                const Outputs o = outputs_of(l, &chunks, item, part);
                if (o.start >= o.stop) continue;
                const Target to = target_of(l, out, added, o.offset);
                multiply_block(l, part, &laid_out, at_row(to, from, width), o.start, o.stop);
            }
    }
}
