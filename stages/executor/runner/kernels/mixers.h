// Mixers with recurrent state, part of cpu.c if MIXERS is defined.

#include "recurrences.h"

void recur(const Recurrence *r, const Segments *s) {
    const long work = tokens_of(s) * r->heads * r->key_width * r->value_width;
#pragma omp parallel if (work > PARALLEL_WORK)
    recur_by_team(r, s);
}

// --- short convolutions --------------------------------------------------------------------------

enum { MOST_TAPS = 8, CHANNELS = 512 };  // channels that a thread takes at once

// Causal, each channel by itself.
typedef struct {
    const number *weight;  // [channels, taps], the last for the token itself
    const number *bias;    // [channels], or NULL
    number *windows;       // [slots, taps - 1, channels], inputs of the last tokens
    long channels, taps;   // taps: 2 to MOST_TAPS
    long activated;        // by SiLU, after rounding
} Convolution;

// Channels `start` to `stop` of one token. rows: its and the earlier tokens' inputs. weights:
// [taps, CHANNELS], and a bias.
INLINE void convolve_token(const Convolution *c, int taps, const number *const *rows,
                           const float *weights, number *out, long start, long stop) {
    for (long i = start; i < stop; i += 16) {
        const Mask mask = first(stop - i);
        const float *weight = weights + (i - start);
        Floats sum = load_floats(weight + taps * CHANNELS);
        UNROLL
        for (int tap = 0; tap < taps; tap++)
            sum = multiply_add(load_wide_some(rows[tap] + i, mask),
                               load_floats(weight + tap * CHANNELS), sum);
        if (c->activated) sum = activate(rounded(sum), GATED_SILU);
        store_narrow_some(out + i, mask, sum);
    }
}

static void convolve_tokens(const Convolution *c, const number *x, long stride, number *out,
                            const float *weights, const number *window, long count, long start,
                            long stop) {
    const long taps = c->taps;
    for (long t = 0; t < count; t++) {
        const number *rows[MOST_TAPS];
        for (long tap = 0; tap < taps; tap++) {
            const long from = t + tap - (taps - 1);
            rows[tap] = from < 0 ? window + (from + taps - 1) * c->channels : x + from * stride;
        }
        number *const to = out + t * c->channels;
        switch (taps) {
        case 2: convolve_token(c, 2, rows, weights, to, start, stop); break;
        case 3: convolve_token(c, 3, rows, weights, to, start, stop); break;
        case 4: convolve_token(c, 4, rows, weights, to, start, stop); break;
        default: convolve_token(c, taps, rows, weights, to, start, stop);
        }
    }
}

// Channels' weights as floats, tap by tap, and the bias.
INLINE void lay_out(const Convolution *c, int taps, long start, long stop, float *weights) {
    const number *from = c->weight + start * taps;
    for (long i = 0; i < stop - start; i++) {
        UNROLL
        for (int tap = 0; tap < taps; tap++)
            weights[tap * CHANNELS + i] = wide(from[i * taps + tap]);
    }
    for (long i = start; i < stop; i++)
        weights[taps * CHANNELS + i - start] = c->bias ? wide(c->bias[i]) : 0.0f;
}

static void lay_out_taps(const Convolution *c, long start, long stop, float *weights) {
    switch (c->taps) {
    case 2: lay_out(c, 2, start, stop, weights); break;
    case 3: lay_out(c, 3, start, stop, weights); break;
    case 4: lay_out(c, 4, start, stop, weights); break;
    default: lay_out(c, c->taps, start, stop, weights);
    }
}

// The window behind some tokens: `count` of them at `x`, after those in `window`.
static void move_window(const Convolution *c, number *window, const number *x, long stride,
                        long count, long start, long stop) {
    const long kept = c->taps - 1;
    for (long row = 0; row < kept; row++) {
        const long of = count + row - kept;
        const number *from = of < 0 ? window + (row + count) * c->channels : x + of * stride;
        memcpy(window + row * c->channels + start, from + start, (stop - start) * sizeof(number));
    }
}

// Channels `start` to `stop` of one segment.
static void convolve_segment(const Convolution *c, const number *x, long stride, number *out,
                             const float *weights, const Segments *s, long segment, long start,
                             long stop) {
    const long kept = (c->taps - 1) * c->channels, count = s->count[segment];
    x += s->first[segment] * stride;
    out += s->first[segment] * c->channels;
    number *window = c->windows + s->slot[segment] * kept;
    convolve_tokens(c, x, stride, out, weights, window, count, start, stop);
    move_window(c, window, x, stride, count, start, stop);
    if (s->save[segment] < 0) return;
    number *to = c->windows + s->save[segment] * kept;
    for (long at = start; at < kept; at += c->channels)
        memcpy(to + at, window + at, (stop - start) * sizeof(number));
}

static void convolve_by_team(const Convolution *c, const number *x, long stride, number *out,
                             const Segments *s) {
    const long blocks = (c->channels + CHANNELS - 1) / CHANNELS;
    // Weights are laid out once for several segments, but each thread gets some.
    const long wanted = (omp_get_num_threads() + blocks - 1) / blocks;
    const long parts = wanted < s->segments ? wanted : s->segments;
#pragma omp for schedule(dynamic)
    for (long item = 0; item < blocks * parts; item++) {
        const long start = item / parts * CHANNELS;
        const long stop = start + CHANNELS < c->channels ? start + CHANNELS : c->channels;
        const long end = (item % parts + 1) * s->segments / parts;
        long segment = item % parts * s->segments / parts;
        while (segment < end && continues(s, segment)) segment++;
        if (segment == end) continue;
        float weights[(MOST_TAPS + 1) * CHANNELS];
        lay_out_taps(c, start, stop, weights);
        for (; segment < s->segments && (segment < end || continues(s, segment)); segment++)
            convolve_segment(c, x, stride, out, weights, s, segment, start, stop);
    }
}

// x: rows `stride` apart. out: [tokens, channels].
void convolve(const Convolution *c, const number *x, long stride, number *out, const Segments *s) {
#pragma omp parallel if (tokens_of(s) * c->channels * c->taps > PARALLEL_WORK)
    convolve_by_team(c, x, stride, out, s);
}

// --- Mamba's selective scan ----------------------------------------------------------------------

// State S of a channel, with its input x and step d: S = exp(a d) S + d x B. The output is S C plus
// x times `residual`.
typedef struct {
    const number *x;                                    // [tokens, channels]
    const float *steps;                                 // [tokens, channels]
    const number *in, *out;                             // [tokens, width], B and C
    long x_stride, step_stride, in_stride, out_stride;  // between tokens
    const float *rates;                                 // [channels, width], a
    const float *residual;                              // [channels], or NULL
    float *state;                                       // [slots, channels, width]
    float *result;                                      // [tokens, channels]
    long channels, width;
} Scan;

enum { SCANNED = 64 };  // channels that a thread takes at once

// Channels `start` to `stop` of one token. state: those of channel 0.
static void scan_token(const Scan *c, long token, float *state, long start, long stop) {
    const number *x = c->x + token * c->x_stride;
    const number *in = c->in + token * c->in_stride, *out = c->out + token * c->out_stride;
    const float *steps = c->steps + token * c->step_stride;
    for (long channel = start; channel < stop; channel++) {
        const Floats step = spread(steps[channel]);
        const Floats added = multiply(step, spread(wide(x[channel])));
        Floats sums = zeros();
        for (long i = 0; i < c->width; i += 16) {
            const Mask mask = first(c->width - i);
            const long at = channel * c->width + i;
            const Floats decay = exponential(multiply(load_floats_some(c->rates + at, mask), step));
            Floats s = multiply(load_floats_some(state + at, mask), decay);
            s = multiply_add(added, load_wide_some(in + i, mask), s);
            store_floats_some(state + at, mask, s);
            sums = multiply_add(s, load_wide_some(out + i, mask), sums);
        }
        const float more = c->residual ? c->residual[channel] * wide(x[channel]) : 0.0f;
        c->result[token * c->channels + channel] = sum_of(sums) + more;
    }
}

void scan(const Scan *c, const Segments *s) {
    const long blocks = (c->channels + SCANNED - 1) / SCANNED, size = c->channels * c->width;
#pragma omp parallel for schedule(dynamic) if (tokens_of(s) * size * 8 > PARALLEL_WORK)
    for (long item = 0; item < s->segments * blocks; item++) {
        const long start = item % blocks * SCANNED;
        const long stop = start + SCANNED < c->channels ? start + SCANNED : c->channels;
        long segment = item / blocks;
        if (continues(s, segment)) continue;
        do {
            float *state = c->state + s->slot[segment] * size;
            const long end = s->first[segment] + s->count[segment];
            for (long token = s->first[segment]; token < end; token++)
                scan_token(c, token, state, start, stop);
            if (s->save[segment] >= 0)
                memcpy(c->state + s->save[segment] * size + start * c->width,
                       state + start * c->width, (stop - start) * c->width * sizeof(float));
        } while (++segment < s->segments && continues(s, segment));
    }
}

// --- Gated DeltaNet ------------------------------------------------------------------------------

// From projections of each token, side by side: keys, queries and values, which are convolved; the
// gates of the outputs, [heads, value_width]; learning rates, [heads]; steps, [heads].
typedef struct {
    Convolution convolution;
    Recurrence recurrence;  // without the pointers to a step's numbers
    const number *rates;    // [heads], logarithms
    const number *biases;   // [heads], of steps
    const number *norm;     // [value_width]
    float epsilon;
} DeltaMixer;

INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// The decays and learning rates of rows, as floats.
static void gates_by_team(const DeltaMixer *m, const number *rates, long stride, long rows,
                          float *decays, float *betas) {
    const long heads = m->recurrence.heads;
    float factors[heads];
    for (long head = 0; head < heads; head++) factors[head] = -expf(wide(m->rates[head]));
#pragma omp for nowait
    for (long row = 0; row < rows; row++) {
        const number *rate = rates + row * stride, *step = rate + heads;
        for (long head = 0; head < heads; head += 16) {
            const Mask mask = first(heads - head);
            const Floats e = exponential(subtract(zeros(), load_wide_some(rate + head, mask)));
            const Floats beta = rounded(divide(spread(1.0f), add(spread(1.0f), e)));
            store_floats_some(betas + row * heads + head, mask, beta);
        }
        for (long head = 0; head < heads; head++)
            decays[row * heads + head] =
                factors[head] * softplus(wide(step[head]) + wide(m->biases[head]));
    }
}

// RMSNorm of a head's outputs, in place, times SiLU of their gates in float32.
INLINE void norm_gated(const DeltaMixer *m, number *x, const number *gates) {
    const long width = m->recurrence.value_width;
    norm_row(x, m->norm, x, width, m->epsilon, 0);
    for (long i = 0; i < width; i += 16) {
        const Mask mask = first(width - i);
        const Floats gate = activate(load_wide_some(gates + i, mask), GATED_SILU);
        store_narrow_some(x + i, mask, multiply(load_wide_some(x + i, mask), gate));
    }
}

// projected: rows `stride` apart. out: [rows, heads, value_width]. memory: for each row 2 * heads
// floats and the convolution's channels, and for a cache line.
static void mix_by_team(const DeltaMixer *m, const number *projected, long stride, long rows,
                        number *out, void *memory, const Segments *s) {
    Recurrence r = m->recurrence;
    const long channels = m->convolution.channels, width = r.heads * r.value_width;
    float *decays = (float *)(((uintptr_t)memory + 63) / 64 * 64);
    float *betas = decays + rows * r.heads;
    number *mixed = (number *)(betas + rows * r.heads);
    const number *gates = projected + channels;
    gates_by_team(m, gates + width, stride, rows, decays, betas);
    convolve_by_team(&m->convolution, projected, stride, mixed, s);
    r.queries = mixed;
    r.keys = mixed + r.groups * r.key_width;
    r.values = mixed + 2 * r.groups * r.key_width;
    r.query_stride = r.key_stride = r.value_stride = channels;
    r.decays = decays;
    r.decay_stride = r.heads;
    r.betas = betas;
    r.out = out;
    recur_by_team(&r, s);
#pragma omp for
    for (long row = 0; row < rows; row++)
        for (long at = 0; at < width; at += r.value_width)
            norm_gated(m, out + row * width + at, gates + row * stride + at);
}

void mix(const DeltaMixer *m, const number *projected, long stride, long rows, number *out,
         void *memory, const Segments *s) {
    const long work = rows * m->recurrence.heads * m->recurrence.key_width;
#pragma omp parallel if (work * m->recurrence.value_width > PARALLEL_WORK)
    mix_by_team(m, projected, stride, rows, out, memory, s);
}
