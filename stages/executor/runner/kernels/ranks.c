// Collectives between processes of one host over shared memory.
//
// The memory has a header, a line per rank, two slots per rank for collectives, and for each
// ordered pair of ranks a channel with a ring of slots. An operation on a tensor larger than a slot
// consists of several rounds. In a round each rank writes its slot, publishes its counter, and
// waits for other ranks' counters. Slots alternate: a rank writes a slot again two rounds later,
// when every rank has arrived at the round between, and therefore has read it.
//
// Functions return before they have finished if a wait takes long; `resume` continues.

#define _GNU_SOURCE
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    FORMAT = 1,
    MOST_RANKS = 64,
    LINE = 64,
    PAGE = 4096,
    RING = 4,     // slots of a channel
    BLOCK = 256,  // numbers that are added at a time
    // Looks at a counter before other threads may have the core, and then before the thread sleeps.
    // Measured with 2 and 4 ranks on two cores: longer spins cost as soon as cores are shared.
    SPINS = 20,
    YIELDS = 100,
    REASON = 512,
};

#define MAGIC 0x736b6e61722d6f6eULL

// Near its end, so that no program depends on counters that never wrap.
#define FIRST 0xfffffc00u

enum status { DONE, AGAIN, FAILED, CLOSED, OUT_OF_STEP };
enum kind { ALL_REDUCE = 1, ALL_GATHER, BROADCAST, MESSAGE };
enum element { OTHER, FLOAT32, BFLOAT16 };
enum state { ABSENT, PRESENT, LEFT };

struct counter {
    _Alignas(LINE) _Atomic uint32_t value;
    _Atomic uint32_t sleepers;
};

struct member {
    struct counter arrived;
    uint64_t tags[2];  // of the last two rounds; valid if arrived
    _Alignas(LINE) _Atomic uint32_t state;
    uint32_t process;
    uint64_t started;
};

struct channel {
    struct counter sent, received;
    uint64_t tags[RING];
};

struct memory {
    uint64_t magic;
    uint32_t format, size;
    uint64_t slot_bytes;
    _Alignas(LINE) _Atomic uint32_t failed;  // 1: the reason is being written; 2: it can be read
    char reason[REASON];
    struct member members[MOST_RANKS];
};

// A rank's own side, with the operation that runs.
struct side {
    struct memory *memory;
    uint32_t rank, round;
    uint64_t tag_before;
    uint32_t kind, element, peer, sends, written;
    uint64_t tag, bytes, offset;
    const uint8_t *input;
    uint8_t *output;
    uint32_t other;  // out: the rank that is waited for, or is out of step, and its tag
    uint64_t other_tag;
};

// --- layout ------------------------------------------------------------------------------------

static size_t whole_pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

static size_t channels_start(void) { return whole_pages(sizeof(struct memory)); }

static size_t slots_start(uint32_t size) {
    return whole_pages(channels_start() + sizeof(struct channel) * size * size);
}

static uint8_t *slot(struct memory *m, uint32_t rank, uint32_t round) {
    return (uint8_t *)m + slots_start(m->size) + (rank * 2 + (round & 1)) * m->slot_bytes;
}

static struct channel *channel(struct memory *m, uint32_t from, uint32_t to) {
    return (struct channel *)((uint8_t *)m + channels_start()) + from * m->size + to;
}

static uint8_t *channel_slot(struct memory *m, uint32_t from, uint32_t to, uint32_t number) {
    const size_t ring = (size_t)(from * m->size + to) * RING + number % RING;
    return (uint8_t *)m + slots_start(m->size) + (m->size * 2 + ring) * m->slot_bytes;
}

uint64_t memory_bytes(uint32_t size, uint64_t slot_bytes) {
    return slots_start(size) + (2 * size + (uint64_t)RING * size * size) * slot_bytes;
}

// NULL if it can't be mapped.
struct memory *map(int descriptor, uint64_t bytes) {
    void *m = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    return m == MAP_FAILED ? NULL : m;
}

void unmap(struct memory *m, uint64_t bytes) { munmap(m, bytes); }

void initialise(struct memory *m, uint32_t size, uint64_t slot_bytes) {
    m->format = FORMAT;
    m->size = size;
    m->slot_bytes = slot_bytes;
    for (uint32_t rank = 0; rank < size; rank++) m->members[rank].arrived.value = FIRST;
    for (uint32_t i = 0; i < size * size; i++)
        channel(m, 0, i)->sent.value = channel(m, 0, i)->received.value = FIRST;
    m->magic = MAGIC;
}

// The number of ranks; 0 if this is no such memory of so many bytes.
uint32_t checked_size(const struct memory *m, uint64_t bytes) {
    if (bytes < sizeof *m || m->magic != MAGIC || m->format != FORMAT) return 0;
    if (m->size < 1 || m->size > MOST_RANKS || m->slot_bytes % LINE) return 0;
    return m->slot_bytes <= bytes && memory_bytes(m->size, m->slot_bytes) == bytes ? m->size : 0;
}

// --- waiting -----------------------------------------------------------------------------------

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void wake(struct counter *c) {
    syscall(SYS_futex, &c->value, FUTEX_WAKE, INT32_MAX, 0, 0, 0);
}

static void publish(struct counter *c, uint32_t value) {
    atomic_store(&c->value, value);
    if (atomic_load(&c->sleepers)) wake(c);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static bool reached(struct counter *c, uint32_t target, uint32_t *value) {
    *value = atomic_load_explicit(&c->value, memory_order_acquire);
    return (int32_t)(*value - target) >= 0;
}

// Wait until another rank's counter has reached a value.
static enum status await(struct side *s, uint32_t other, struct counter *c, uint32_t target,
                         int64_t wait_ns) {
    struct memory *m = s->memory;
    int64_t until = 0;
    uint32_t value;
    for (uint32_t looks = 0;; looks++) {
        if (reached(c, target, &value)) return DONE;
        s->other = other;
        if (atomic_load_explicit(&m->failed, memory_order_relaxed)) return FAILED;
        if (atomic_load_explicit(&m->members[other].state, memory_order_acquire) == LEFT)
            return reached(c, target, &value) ? DONE : CLOSED;
        if (looks < SPINS) {
            pause_briefly();
        } else if (looks < SPINS + YIELDS) {
            sched_yield();
        } else {
            const int64_t now = now_ns();
            if (until == 0) until = now + wait_ns;
            if (now >= until) return AGAIN;
            const int64_t left = until - now;
            struct timespec t = {left / 1000000000, left % 1000000000};
            atomic_fetch_add(&c->sleepers, 1);
            syscall(SYS_futex, &c->value, FUTEX_WAIT, value, &t, 0, 0);
            atomic_fetch_sub(&c->sleepers, 1);
        }
    }
}

static enum status out_of_step(struct side *s, uint32_t other, uint64_t tag) {
    s->other = other;
    s->other_tag = tag;
    return OUT_OF_STEP;
}

// Wait until a rank has arrived at a round, and compare what it does there.
static enum status arrived(struct side *s, uint32_t other, uint32_t round, uint64_t tag,
                           int64_t wait_ns) {
    struct member *member = &s->memory->members[other];
    const enum status status = await(s, other, &member->arrived, round + 1, wait_ns);
    if (status) return status;
    const uint64_t theirs = member->tags[round & 1];
    return theirs == tag ? DONE : out_of_step(s, other, theirs);
}

static enum status all_arrived(struct side *s, uint32_t round, uint64_t tag, int64_t wait_ns) {
    for (uint32_t other = 0; other < s->memory->size; other++) {
        const enum status status = other == s->rank ? DONE : arrived(s, other, round, tag, wait_ns);
        if (status) return status;
    }
    return DONE;
}

// --- sums --------------------------------------------------------------------------------------

static inline float from_bfloat16(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline uint16_t to_bfloat16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    const uint32_t even = bits + 0x7fff + (bits >> 16 & 1);
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : even >> 16;
}

// Add parts in the order of sum_pairwise: neighbours, then neighbours of the sums. Each addition
// rounds to the dtype, so that a sum of sums is the sum of all.
#define DEFINE_SUM(NAME, TYPE, FROM, TO)                                                        \
    static void NAME(uint8_t *restrict output, const uint8_t *const *parts, uint32_t size,      \
                     size_t number) {                                                           \
        TYPE sums[MOST_RANKS / 2][BLOCK];                                                       \
        for (size_t start = 0; start < number; start += BLOCK) {                                \
            const size_t n = number - start < BLOCK ? number - start : BLOCK;                   \
            for (uint32_t pair = 0; pair < (size + 1) / 2; pair++) {                            \
                const TYPE *a = (const TYPE *)parts[pair * 2] + start;                          \
                if (pair * 2 + 1 == size) {                                                     \
                    memcpy(sums[pair], a, n * sizeof(TYPE));                                    \
                    break;                                                                      \
                }                                                                               \
                const TYPE *b = (const TYPE *)parts[pair * 2 + 1] + start;                      \
                for (size_t i = 0; i < n; i++) sums[pair][i] = TO(FROM(a[i]) + FROM(b[i]));     \
            }                                                                                   \
            for (uint32_t left = (size + 1) / 2; left > 1; left = (left + 1) / 2) {             \
                for (uint32_t pair = 0; pair < left / 2; pair++) {                              \
                    const TYPE *a = sums[pair * 2], *b = sums[pair * 2 + 1];                    \
                    for (size_t i = 0; i < n; i++) sums[pair][i] = TO(FROM(a[i]) + FROM(b[i])); \
                }                                                                               \
                if (left % 2) memcpy(sums[left / 2], sums[left - 1], n * sizeof(TYPE));         \
            }                                                                                   \
            memcpy((TYPE *)output + start, sums[0], n * sizeof(TYPE));                          \
        }                                                                                       \
    }

#define SAME(x) (x)
DEFINE_SUM(sum_float32, float, SAME, SAME)
DEFINE_SUM(sum_bfloat16, uint16_t, from_bfloat16, to_bfloat16)

// --- operations --------------------------------------------------------------------------------

static size_t piece_bytes(const struct side *s) {
    const uint64_t left = s->bytes - s->offset, most = s->memory->slot_bytes;
    return left < most ? left : most;
}

static void take(struct side *s, size_t bytes) {
    struct memory *m = s->memory;
    if (s->kind == ALL_REDUCE) {
        const uint8_t *parts[MOST_RANKS];
        for (uint32_t rank = 0; rank < m->size; rank++) parts[rank] = slot(m, rank, s->round);
        parts[s->rank] = s->input + s->offset;
        if (s->element == FLOAT32)
            sum_float32(s->output + s->offset, parts, m->size, bytes / sizeof(float));
        else
            sum_bfloat16(s->output + s->offset, parts, m->size, bytes / sizeof(uint16_t));
    } else if (s->kind == ALL_GATHER) {
        for (uint32_t rank = 0; rank < m->size; rank++) {
            const bool own = rank == s->rank;
            const uint8_t *from = own ? s->input + s->offset : slot(m, rank, s->round);
            memcpy(s->output + rank * s->bytes + s->offset, from, bytes);
        }
    } else if (s->rank != 0) {
        memcpy(s->output + s->offset, slot(m, 0, s->round), bytes);
    }
}

static enum status collective(struct side *s, int64_t wait_ns) {
    struct memory *m = s->memory;
    struct member *own = &m->members[s->rank];
    do {
        const size_t bytes = piece_bytes(s);
        enum status status;
        if (!s->written) {
            // Others may not have arrived at the round before, if that was a broadcast.
            if (s->tag_before) {
                status = all_arrived(s, s->round - 1, s->tag_before, wait_ns);
                if (status) return status;
            }
            own->tags[s->round & 1] = s->tag;
            if (s->kind != BROADCAST || s->rank == 0)
                memcpy(slot(m, s->rank, s->round), s->input + s->offset, bytes);
            publish(&own->arrived, s->round + 1);
            s->written = 1;
        }
        if (s->kind != BROADCAST)
            status = all_arrived(s, s->round, s->tag, wait_ns);
        else
            status = s->rank == 0 ? DONE : arrived(s, 0, s->round, s->tag, wait_ns);
        if (status) return status;
        take(s, bytes);
        s->offset += bytes;
        s->round++;
        s->written = 0;
        s->tag_before = s->tag;
    } while (s->offset < s->bytes);
    return DONE;
}

static enum status message(struct side *s, int64_t wait_ns) {
    struct memory *m = s->memory;
    const bool sends = s->sends;
    const uint32_t from = sends ? s->rank : s->peer, to = sends ? s->peer : s->rank;
    struct channel *c = channel(m, from, to);
    do {
        const size_t bytes = piece_bytes(s);
        // Each side is the only writer of its counter.
        const uint32_t number = atomic_load(sends ? &c->sent.value : &c->received.value);
        if (sends) {
            const uint32_t room = number + 1 - RING;
            const enum status status = await(s, to, &c->received, room, wait_ns);
            if (status) return status;
            c->tags[number % RING] = s->tag;
            memcpy(channel_slot(m, from, to, number), s->input + s->offset, bytes);
            publish(&c->sent, number + 1);
        } else {
            const enum status status = await(s, from, &c->sent, number + 1, wait_ns);
            if (status) return status;
            const uint64_t theirs = c->tags[number % RING];
            if (theirs != s->tag) return out_of_step(s, from, theirs);
            memcpy(s->output + s->offset, channel_slot(m, from, to, number), bytes);
            publish(&c->received, number + 1);
        }
        s->offset += bytes;
    } while (s->offset < s->bytes);
    return DONE;
}

static enum status advance(struct side *s, int64_t wait_ns) {
    if (atomic_load_explicit(&s->memory->failed, memory_order_relaxed)) return FAILED;
    return s->kind == MESSAGE ? message(s, wait_ns) : collective(s, wait_ns);
}

// Continue an operation, for about so long in each wait.
int resume(struct side *s, int64_t wait_ns) { return advance(s, wait_ns); }

// The tag: kind and dtype in the two upper bytes, the number of bytes in the others.
int start(struct side *s, uint64_t tag, uint32_t element, uint32_t peer, uint32_t sends,
          const void *input, void *output, int64_t wait_ns) {
    s->tag = tag;
    s->kind = tag >> 56;
    s->bytes = tag & ((UINT64_C(1) << 48) - 1);
    s->element = element;
    s->peer = peer;
    s->sends = sends;
    s->input = input;
    s->output = output;
    s->offset = 0;
    s->written = 0;
    return advance(s, wait_ns);
}

// --- life --------------------------------------------------------------------------------------

// Take a rank's place; false if it is taken.
bool enter(struct side *s, struct memory *m, uint32_t rank, uint32_t process, uint64_t started) {
    struct member *own = &m->members[rank];
    memset(s, 0, sizeof *s);
    s->memory = m;
    s->rank = rank;
    s->round = FIRST;
    uint32_t absent = ABSENT;
    if (!atomic_compare_exchange_strong(&own->state, &absent, PRESENT)) return false;
    own->started = started;
    // Others read the start after the process.
    __atomic_store_n(&own->process, process, __ATOMIC_RELEASE);
    return true;
}

// The process of a rank, or 0 before it has entered, and its start.
uint32_t process_of(struct memory *m, uint32_t rank, uint64_t *started) {
    const uint32_t process = __atomic_load_n(&m->members[rank].process, __ATOMIC_ACQUIRE);
    *started = m->members[rank].started;
    return process;
}

static void wake_all(struct memory *m) {
    for (uint32_t rank = 0; rank < m->size; rank++) wake(&m->members[rank].arrived);
    for (uint32_t i = 0; i < m->size * m->size; i++) {
        wake(&channel(m, 0, i)->sent);
        wake(&channel(m, 0, i)->received);
    }
}

void leave(struct memory *m, uint32_t rank) {
    atomic_store(&m->members[rank].state, LEFT);
    wake_all(m);
}

// Only the first reason is kept.
void fail(struct memory *m, const char *reason) {
    uint32_t none = 0;
    if (atomic_compare_exchange_strong(&m->failed, &none, 1)) {
        snprintf(m->reason, REASON, "%s", reason);
        atomic_store(&m->failed, 2);
    }
    wake_all(m);
}

const char *reason(struct memory *m) {
    return atomic_load(&m->failed) == 2 ? m->reason : "another rank has failed";
}
