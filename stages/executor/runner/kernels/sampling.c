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
            __m512 most = _mm512_set1_ps(-INFINITY);
            __mmask16 broken = 0;
            for (long i = start; i < stop; i += 16) {
                __mmask16 mask = first(stop - i);
                __m512 v = _mm512_mask_loadu_ps(most, mask, from + i);
                broken |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
                most = _mm512_max_ps(most, v);
            }
            maxima[span] = broken ? NAN : _mm512_reduce_max_ps(most);
        }
#pragma omp single
        {
            float most = -INFINITY;
            for (long span = 0; span < spans; span++)
                if (maxima[span] > most || maxima[span] != maxima[span]) most = maxima[span];
            largest[row] = most;
            places[row] = width;
        }
        const __m512 most = _mm512_set1_ps(largest[row]), divisor = _mm512_set1_ps(divisors[row]);
#pragma omp for
        for (long b = 0; b < blocks; b++) {
            const long start = b * block, stop = start + block < width ? start + block : width;
            __m512 sum = _mm512_setzero_ps();
            for (long i = start; i < stop; i += 16) {
                __mmask16 mask = first(stop - i);
                __m512 v = _mm512_maskz_loadu_ps(mask, from + i);
                __mmask16 equal = _mm512_mask_cmp_ps_mask(mask, v, most, _CMP_EQ_OQ);
                if (equal) {
                    const int64_t place = i + __builtin_ctz(equal);
#pragma omp critical
                    if (place < places[row]) places[row] = place;
                }
                v = exponential(_mm512_div_ps(_mm512_sub_ps(v, most), divisor));
                sum = _mm512_mask_add_ps(sum, mask, sum, v);
            }
            sums[row * blocks + b] = _mm512_reduce_add_ps(sum);
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
    const __m512 most = _mm512_set1_ps(largest), divisors = _mm512_set1_ps(divisor);
    for (long i = 0; i < count; i += 16) {
        __m512 v = _mm512_maskz_loadu_ps(first(count - i), x + start + i);
        v = exponential(_mm512_div_ps(_mm512_sub_ps(v, most), divisors));
        _mm512_storeu_ps(weights + i, v);
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
    const __m512 never = _mm512_set1_ps(-INFINITY);
#pragma omp parallel for collapse(2) if (rows * width > PARALLEL_WORK)
    for (long row = 0; row < rows; row++)
        for (long span = 0; span < spans; span++) {
            const long start = span * SPAN, stop = start + SPAN < width ? start + SPAN : width;
            const uint32_t *from = allowed + row * words;
            float *to = x + places[row] * width;
            for (long i = start; i < stop; i += 32) {
                const uint32_t forbidden = ~from[i / 32];
                if (forbidden == 0) continue;
                _mm512_mask_storeu_ps(to + i, first(stop - i) & forbidden, never);
                _mm512_mask_storeu_ps(to + i + 16, first(stop - i - 16) & forbidden >> 16, never);
            }
        }
}
