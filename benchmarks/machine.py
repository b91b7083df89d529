"""The state that the machine is in, and its floors: bandwidth and the way between two cores.

Shared machines change within seconds, so both are taken in the run that they are to explain.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
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

/* Bytes per second that some threads together read of fresh memory: the median of seven passes. */
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

/* Seconds from one core to another and back. */
double round_trip(void) {
    pthread_t id;
    double result = 0;
    pthread_create(&id, NULL, ask, &result);
    pthread_join(id, NULL);
    return result;
}
"""


NEAR_NS, FAR_NS = 150, 250
"""Two cores share a cache where the way there and back takes less than the first, and none where it
takes more than the second."""


@dataclass(frozen=True)
class State:
    """What was measured at one moment."""

    bytes_per_s: float
    round_trip_ns: float

    @property
    def name(self) -> str:
        """Where the cores are: "near" or "far" from one another, or "" for neither."""
        if self.round_trip_ns < NEAR_NS:
            return "near"
        return "far" if self.round_trip_ns > FAR_NS else ""


def state_around(before: State | None, after: State | None) -> str:
    """The state that the machine was in meanwhile: "changing" where that is not known to be one,
    "unknown" where nothing was measured."""
    if before is None or after is None:
        return "unknown"
    return before.name if before.name == after.name and before.name else "changing"


def measure(threads: int) -> State | None:
    """The state now; None without a C compiler."""
    library = _library()
    if library is None:
        return None
    return State(library.bandwidth(threads), library.round_trip() * 1e9)


@cache
def _library() -> ctypes.CDLL | None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    folder = Path(tempfile.mkdtemp(prefix="nano-inference-"))
    source, target = folder / "machine.c", folder / "machine.so"
    source.write_text(SOURCE)
    flags = ("-O3", "-march=native", "-shared", "-fPIC", "-pthread")
    subprocess.run([compiler, *flags, str(source), "-o", str(target)], check=True)
    library = ctypes.CDLL(str(target))
    library.bandwidth.restype = library.round_trip.restype = ctypes.c_double
    return library
