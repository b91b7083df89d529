// Kernels for logits, which are float32 for every model.

#include "vectors.h"

enum {
    SPAN = 16384,   // numbers that a thread takes at a time; a multiple of any block
    TOGETHER = 16,  // rows whose sums are kept at a time
};

// For each row of [rows, width]: its largest number (NaN if it has one), the first place of it, the
// sums of exp((x - largest) / divisor) over blocks, [rows, blocks], and the logarithm of their
// total.
void softmax_sums(const float *x, long rows, long width, const float *divisors, long block,
                  float *largest, int64_t *places, double *sums, double *logs) {
    const long spans = (width + SPAN - 1) / SPAN, blocks = (width + block - 1) / block;
    float maxima[spans];
#pragma omp parallel if (rows * width > PARALLEL_WORK)
    for (long row = 0; row < rows; row++) {
        const float *from = x + row * width;
#pragma omp for
        for (long span = 0; span < spans; span++) {
            const long start = span * SPAN, stop = start + SPAN < width ? start + SPAN : width;
            Floats most = spread(-INFINITY);
            Mask broken = 0;
            for (long i = start; i < stop; i += 16) {
                Mask mask = first(stop - i);
                Floats v = load_floats_over(most, from + i, mask);
                broken |= not_numbers(v);
                most = maximum(most, v);
            }
            maxima[span] = broken ? NAN : largest_of(most);
        }
#pragma omp single
        {
            float most = -INFINITY;
            for (long span = 0; span < spans; span++)
                if (maxima[span] > most || maxima[span] != maxima[span]) most = maxima[span];
            largest[row] = most;
            places[row] = width;
        }
        const Floats most = spread(largest[row]), divisor = spread(divisors[row]);
#pragma omp for
        for (long b = 0; b < blocks; b++) {
            const long start = b * block, stop = start + block < width ? start + block : width;
            Floats sum = zeros();
            for (long i = start; i < stop; i += 16) {
                Mask mask = first(stop - i);
                Floats v = load_floats_some(from + i, mask);
                Mask equal = mask & equal_lanes(v, most);
                if (equal) {
                    const int64_t place = i + __builtin_ctz(equal);
#pragma omp critical
                    if (place < places[row]) places[row] = place;
                }
                v = exponential(divide(subtract(v, most), divisor));
                sum = merged(sum, mask, add(sum, v));
            }
            sums[row * blocks + b] = sum_of(sum);
        }
    }
    for (long row = 0; row < rows; row++) {
        double total = 0;
        for (long b = 0; b < blocks; b++) total += sums[row * blocks + b];
        logs[row] = log(total);
    }
}

// A target, not below 0, and strictly below a total.
static double below(double target, double total) {
    return fmin(fmax(target, 0.0), nextafter(total, 0.0));
}

// The place in a row at which the running sum of exp((x - largest) / divisor) first exceeds
// uniform * total. The results of softmax_sums select the block; weight 0 is never chosen.
static long drawn(const float *x, long width, float divisor, long block, float largest,
                  const double *sums, double uniform) {
    const long blocks = (width + block - 1) / block;
    float weights[block + 16];
    double total = 0, before = 0;
    for (long b = 0; b < blocks; b++) total += sums[b];
    const double target = below(uniform * total, total);
    long b = 0;
    while (b < blocks - 1 && before + sums[b] <= target) before += sums[b++];
    const long start = b * block, count = start + block < width ? block : width - start;
    const Floats most = spread(largest), divisors = spread(divisor);
    for (long i = 0; i < count; i += 16) {
        Floats v = load_floats_some(x + start + i, first(count - i));
        v = exponential(divide(subtract(v, most), divisors));
        store_floats(weights + i, v);
    }
    double inside = 0, running = 0;
    for (long i = 0; i < count; i++) inside += weights[i];
    // The block's sum and this one differ by rounding, so the target may lie just outside.
    const double rest = below(target - before, inside);
    long place = 0;
    while (place < count - 1 && (running += weights[place]) <= rest) place++;
    return start + place;
}

// For each row of [rows, width], a token and its logprob. At temperature 0 the token is the first
// of the largest numbers, with its logprob at 1; `uniforms` is not read then. If the largest number
// is not finite, the token is 0 and its logprob NaN.
void sample(const float *x, long rows, long width, const float *temperatures,
            const double *uniforms, long block, int64_t *tokens, float *logprobs) {
    const long blocks = (width + block - 1) / block;
    float divisors[TOGETHER], largest[TOGETHER];
    double sums[TOGETHER * blocks], logs[TOGETHER];
    for (long begin = 0; begin < rows; begin += TOGETHER, x += TOGETHER * width) {
        const long count = begin + TOGETHER < rows ? TOGETHER : rows - begin;
        for (long row = 0; row < count; row++) {
            const float temperature = temperatures[begin + row];
            divisors[row] = temperature == 0 ? 1 : temperature;
        }
        softmax_sums(x, count, width, divisors, block, largest, tokens + begin, sums, logs);
        for (long row = 0; row < count; row++) {
            const float *from = x + row * width;
            int64_t *token = tokens + begin + row;
            if (!isfinite(largest[row])) {
                *token = 0;
                logprobs[begin + row] = NAN;
                continue;
            }
            if (temperatures[begin + row] != 0)
                *token = drawn(from, width, divisors[row], block, largest[row], sums + row * blocks,
                               uniforms[begin + row]);
            logprobs[begin + row] = (from[*token] - largest[row]) / divisors[row] - logs[row];
        }
    }
}

// Sets forbidden numbers to minus infinity: row i of `allowed` has a bit for each number of row
// places[i] of x, in words of 32, lowest first. Allowed numbers are not accessed.
void forbid(float *x, long width, const int64_t *places, const uint32_t *allowed, long rows) {
    const long words = (width + 31) / 32, spans = (width + SPAN - 1) / SPAN;
    const Floats never = spread(-INFINITY);
#pragma omp parallel for collapse(2) if (rows * width > PARALLEL_WORK)
    for (long row = 0; row < rows; row++)
        for (long span = 0; span < spans; span++) {
            const long start = span * SPAN, stop = start + SPAN < width ? start + SPAN : width;
            const uint32_t *from = allowed + row * words;
            float *to = x + places[row] * width;
            for (long i = start; i < stop; i += 32) {
                const uint32_t forbidden = ~from[i / 32];
                if (forbidden == 0) continue;
                store_floats_some(to + i, first(stop - i) & forbidden, never);
                store_floats_some(to + i + 16, first(stop - i - 16) & forbidden >> 16, never);
            }
        }
}
