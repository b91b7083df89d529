/* Measurements of machine.py. */
#define _GNU_SOURCE
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { ROUNDS = 100000, THREADS = 64 };
static const size_t SIZE = (size_t)512 << 20;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

typedef struct { const long *from; size_t count; long sum; } Part;

static void *add(void *argument) {
    Part *part = argument;
    long sums[8] = {0};
    for (size_t i = 0; i < part->count; i += 8)
        for (int j = 0; j < 8; j++) sums[j] += part->from[i + j];
    for (int j = 0; j < 8; j++) part->sum += sums[j];
    return NULL;
}

/* Bytes per second that the threads together read from memory: the median of seven passes. */
double bandwidth(int threads) {
    char *memory = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 0;
    madvise(memory, SIZE, MADV_HUGEPAGE);
    memset(memory, 1, SIZE);
    if (threads > THREADS) threads = THREADS;
    double times[7];
    for (int pass = 0; pass < 7; pass++) {
        pthread_t ids[THREADS];
        Part parts[THREADS] = {0};
        size_t each = SIZE / sizeof(long) / threads / 8 * 8;
        double start = now();
        for (int t = 0; t < threads; t++) {
            parts[t] = (Part){(const long *)memory + t * each, each, 0};
            pthread_create(&ids[t], NULL, add, &parts[t]);
        }
        for (int t = 0; t < threads; t++) pthread_join(ids[t], NULL);
        times[pass] = now() - start;
        for (int i = pass; i > 0 && times[i] < times[i - 1]; i--) {
            double swap = times[i];
            times[i] = times[i - 1];
            times[i - 1] = swap;
        }
    }
    munmap(memory, SIZE);
    return SIZE / times[3];
}

enum { VECTORS = 12, STEPS = 2000000 };
typedef float Vector __attribute__((vector_size(32)));

static void *multiply(void *result) {
    Vector sums[VECTORS] = {0}, factor = {0};
    factor += 0.5f;
    for (int i = 0; i < STEPS; i++)
#pragma GCC unroll 12
        for (int j = 0; j < VECTORS; j++) {
            sums[j] = sums[j] * factor + factor;
            __asm__("" : "+x"(sums[j]));
        }
    for (int j = 1; j < VECTORS; j++) sums[0] += sums[j];
    *(float *)result = sums[0][0];
    return NULL;
}

static double multiplied(int threads) {
    pthread_t ids[THREADS];
    float results[THREADS];
    double start = now();
    for (int t = 0; t < threads; t++) pthread_create(&ids[t], NULL, multiply, &results[t]);
    for (int t = 0; t < threads; t++) pthread_join(ids[t], NULL);
    return threads / (now() - start);
}

/* Multiplications of two threads relative to one: 2, or 1 if they share a core's units. */
double cores(void) {
    double alone = multiplied(1);
    return multiplied(2) / alone;
}

#ifdef __AVX512BF16__
enum { SUMS = 16, PRODUCTS = 5000000 };

/* Products and sums of pairs of bfloat16, in as many registers as hide the latency. */
static void *products(void *result) {
    __m512 sums[SUMS];
    __m512bh pairs = (__m512bh)_mm512_set1_epi16(0x3c00);
#pragma GCC unroll 16
    for (int j = 0; j < SUMS; j++) {
        sums[j] = _mm512_setzero_ps();
        __asm__("" : "+v"(sums[j])); /* else the compiler sees that all are equal */
    }
    for (int i = 0; i < PRODUCTS; i++) {
#pragma GCC unroll 16
        for (int j = 0; j < SUMS; j++) sums[j] = _mm512_dpbf16_ps(sums[j], pairs, pairs);
        __asm__("" : "+v"(pairs));
    }
#pragma GCC unroll 16
    for (int j = 1; j < SUMS; j++) sums[0] = _mm512_add_ps(sums[0], sums[j]);
    *(float *)result = _mm512_reduce_add_ps(sums[0]);
    return NULL;
}
#endif

/* Additions and multiplications of bfloat16 per second by vectors, the best of three passes; 0
   without AVX512-BF16. */
double arithmetic(int threads) {
    double best = 0;
#ifdef __AVX512BF16__
    pthread_t ids[THREADS];
    float results[THREADS];
    if (threads > THREADS) threads = THREADS;
    for (int pass = 0; pass < 3; pass++) {
        double start = now();
        for (int t = 0; t < threads; t++) pthread_create(&ids[t], NULL, products, &results[t]);
        for (int t = 0; t < threads; t++) pthread_join(ids[t], NULL);
        double rate = threads * 64.0 * SUMS * PRODUCTS / (now() - start);
        if (rate > best) best = rate;
    }
#else
    (void)threads;
#endif
    return best;
}

static _Alignas(128) atomic_int ball;

static void pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    sched_setaffinity(0, sizeof set, &set);
}

static void *answer(void *unused) {
    pin(1);
    for (int i = 0; i < ROUNDS; i++) {
        while (atomic_load(&ball) != 2 * i + 1) {}
        atomic_store(&ball, 2 * i + 2);
    }
    return unused;
}

static void *ask(void *result) {
    pthread_t other;
    pin(0);
    atomic_store(&ball, 0);
    pthread_create(&other, NULL, answer, NULL);
    double start = now();
    for (int i = 0; i < ROUNDS; i++) {
        atomic_store(&ball, 2 * i + 1);
        while (atomic_load(&ball) != 2 * i + 2) {}
    }
    *(double *)result = (now() - start) / ROUNDS;
    pthread_join(other, NULL);
    return NULL;
}

/* Seconds of a round trip between two cores. */
double round_trip(void) {
    pthread_t id;
    double result = 0;
    pthread_create(&id, NULL, ask, &result);
    pthread_join(id, NULL);
    return result;
}
