// Linear layers by tiles: weights are the first operand, so they stay as the model has them; rows, of
// which there is less, are laid out.

enum {
    BLOCK_BYTES = 1280 << 10,  // of rows that stay in the second level cache while weights pass by
    SHORT = 2048,              // inputs of weights that the processor does not fetch early enough itself
};

// Rows that are laid out, 16 in a tile of all inputs.
typedef struct {
    const number *tiles;
    long line;   // bytes of a pair's numbers
    long apart;  // numbers from one tile to the next
    long count;  // of rows
} LaidOut;

// Weights of outputs that are computed together: of 16, and of 16 others.
typedef struct {
    const number *these[2];
    const number *next[2];  // what is multiplied after these
} Weights;

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

// Sums of 16 outputs, and 16 others if there are two, with 16 rows, or with 32. With each step `lines`
// cache lines of each, from `done` on, are brought near of what comes next.
INLINE void sum_tiles(int two, int two_rows, const Weights *w, long k, long outputs,
                      const LaidOut *rows, const number *x, long done, long lines, float *sums) {
    const number *weights = w->these[0], *others = w->these[1];
    const number *ahead = w->next[0] + done, *others_ahead = w->next[1] + done;
    const long stride = k * sizeof(number), step = rows->line / sizeof(number) * TILE;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    long i = 0;
    for (; i + WIDTH <= k; i += WIDTH, x += step) {
        ADD_PRODUCTS(weights + i, others + i, stride)
        for (long line = 0; line < lines; line++, ahead += WIDTH, others_ahead += WIDTH) {
            _mm_prefetch((const char *)ahead, _MM_HINT_T1);
            if (two) _mm_prefetch((const char *)others_ahead, _MM_HINT_T1);
        }
    }
    if (i < k) {
        number rest[2][TILE_SIZE];
        for (long j = 0; j < outputs; j++)
            for (int which = 0; which <= two; which++) {
                const number *from = w->these[which] + j * k + i;
                _mm512_storeu_si512(rest[which] + j * WIDTH, (__m512i)load(from, lanes(k - i)));
            }
        written();
        ADD_PRODUCTS(rest[0], rest[1], LINE)
    }
    _tile_stored(0, sums, 64);
    if (two_rows) _tile_stored(1, sums + SUMS, 64);
    if (two) _tile_stored(2, sums + 2 * SUMS, 64);
    if (two && two_rows) _tile_stored(3, sums + 3 * SUMS, 64);
}

// Makes outputs of 16 products of a row, or fewer by the mask, of the gated kinds with `ups`, and puts
// them where they go.
INLINE void put_products(const Linear *l, long part, __m512 products, __m512 ups, Target to,
                         long column, __mmask16 mask) {
    if (l->bias[part])
        products = _mm512_add_ps(products, load_wide_some(l->bias[part] + column, mask));
    if (l->kind >= GATED_SILU)
        products = _mm512_mul_ps(rounded(activate(rounded(products), l->kind)), rounded(ups));
    if (to.added)
        products = _mm512_add_ps(rounded(products), load_wide_some(to.added + column, mask));
    if (l->kind == WIDE)
        _mm512_mask_storeu_ps((float *)to.out + column, mask, rounded(products));
    else
        store_narrow_some((number *)to.out + column, mask, products);
}

// A tile of sums by rows: each vector has all outputs of one.
INLINE void load_sums(const float *sums, long outputs, __m512 *rows) {
    UNROLL for (int i = 0; i < TILE; i++)
        rows[i] = i < outputs ? _mm512_loadu_ps(sums + i * TILE) : _mm512_setzero_ps();
    transpose((__m512i *)rows);
}

// Outputs `start` to `stop` of some rows, 32 at a time, or 16 pairs of gate and up.
static void multiply_block(const Linear *l, long part, const LaidOut *rows, Target to, long start,
                           long stop) {
    const long k = l->inputs, width = output_width(l), gated = l->kind >= GATED_SILU;
    const long outputs = l->outputs[part] < TILE ? l->outputs[part] : TILE;
    const long taken = gated ? TILE : 2 * TILE;
    // While some are multiplied with all rows, the next ones come near, evenly. Of few rows and long
    // weights it would be slower than what the processor fetches by itself.
    const long passes = (rows->count + 2 * TILE - 1) / (2 * TILE);
    const long lines = (TILE + passes - 1) / passes, share = k / WIDTH * WIDTH * lines;
    shape_tiles(outputs, rows->line / sizeof(float));
    for (long column = start; column < stop; column += taken) {
        const int two = gated || stop - column > TILE;
        // The last ones begin earlier than they should if they would end too late; what is put then
        // is what was not put before.
        const long last = l->outputs[part] - outputs, next = gated ? column : column + TILE;
        const long at[2] = {column < last ? column : last, next < last ? next : last};
        const __mmask16 fresh[2] = {first(stop - at[0]) & ~first(column - at[0]),
                                    first(stop - at[1]) & ~first(next - at[1])};
        const number *other = gated ? l->weight[1] : l->weight[part];
        const Weights w = {
            {l->weight[part] + at[0] * k, other + at[1] * k},
            {l->weight[part] + (at[0] + taken) * k, other + (at[1] + taken) * k},
        };
        for (long row = 0, done = 0; row < rows->count; row += 2 * TILE, done += share) {
            const number *x = rows->tiles + row / TILE * rows->apart;
            const int two_rows = rows->count - row > TILE;
            const int more = column + taken < stop && done < TILE * k;
            const long some = more && (passes > 1 || k < SHORT) ? lines : 0;
            float sums[4 * SUMS];
            if (two && two_rows)
                sum_tiles(1, 1, &w, k, outputs, rows, x, done, some, sums);
            else if (two)
                sum_tiles(1, 0, &w, k, outputs, rows, x, done, some, sums);
            else if (two_rows)
                sum_tiles(0, 1, &w, k, outputs, rows, x, done, some, sums);
            else
                sum_tiles(0, 0, &w, k, outputs, rows, x, done, some, sums);
            for (long tile = row; tile < row + 2 * TILE && tile < rows->count; tile += TILE) {
                const float *found = sums + (tile - row) * TILE;
                __m512 products[TILE], others[TILE];
                load_sums(found, outputs, products);
                if (two) load_sums(found + 2 * SUMS, outputs, others);
                for (long i = 0; i < TILE && tile + i < rows->count; i++) {
                    const Target here = at_row(to, tile + i, width);
                    put_products(l, part, products[i], others[i], here, at[0], fresh[0]);
                    if (two && !gated)
                        put_products(l, part, others[i], others[i], here, at[1], fresh[1]);
                }
            }
        }
    }
    _tile_release();
}

// Memory of this thread for so many numbers, the same one with each call.
static number *memory_for(long numbers) {
    static _Thread_local number *memory;
    static _Thread_local long size;
    if (numbers > size) {
        free(memory);
        memory = aligned_alloc(64, numbers * sizeof(number));
        size = numbers;
    }
    return memory;
}

static void linear_by_team(const Linear *l, const number *x, long rows, const number *added,
                           void *out) {
    const long k = l->inputs, steps = (k + WIDTH - 1) / WIDTH;
    const long width = output_width(l);
    // So many rows at a time, blocks of about one size.
    const long most = longer(BLOCK_BYTES / (sizeof(number) * k) / 32 * 32, 64);
    const long blocks = (rows + most - 1) / most;
    const long block = blocks ? ((rows + blocks - 1) / blocks + 31) / 32 * 32 : 0;
    // A row alone lies as it has to: its pairs one behind the other.
    const int alone = rows == 1 && k % WIDTH == 0;
    number *tiles = NULL;
    if (!alone)
#pragma omp single copyprivate(tiles)
        tiles = memory_for(block * steps * WIDTH);
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
