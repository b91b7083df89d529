"""Kills stages and the Redis server under load, and looks for lost or damaged streams.

    python benchmarks/chaos.py [--requests N] [--kills K] [--seed S] [--json FILE]
                               [--concurrency C] [--duration SECONDS] [--server PATH]
                               [--http] [--ranks N] [--standby] [--model FOLDER]

`nano-inference up` uses a server of this program (append-only file, `appendfsync always`) through
a proxy. The requests run once undisturbed, then again under faults: SIGKILL of each stage, SIGKILL
and restart of the server, connections cut. Plain redis-py reads each stream, which is compared with
its undisturbed run.

With `--ranks` the model is spread over so many ranks, which are killed and stopped too (SIGSTOP);
rank 0 is the executor.

With `--standby` each stage has a standby (`pipeline.standby`), which takes over.

With `--http` the requests are SSE streams over two gateways, which are killed too (chaos_http.py).

The exit status is 1 unless no stream was lost, doubled, incomplete or different. Linux only.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import chaos_rig
from chaos_http import HTTP_FAULTS, http_storm
from chaos_rig import STAGES, Deployment, Entry, Load, Proxy, RedisServer, running_deployment
from harness import percentile, print_table

TARGETS = (*STAGES, "redis", "connections")
RANK_SIGNALS = {"rank": signal.SIGKILL, "rank, stopped": signal.SIGSTOP}
STOPPED_LEADER = "executor, stopped"
RANK_SETTINGS = {"engine.deterministic": True, "engine.rank_timeout_s": 1.0}
FAULTS = ("lost", "duplicated", "gaps", "mismatched")
PREFIX = "nano-benchmark-chaos"
SETTINGS: dict[str, object] = {
    "bus.prefix": PREFIX,
    # Batches differ between runs; with fewer bits that decides between tokens of similar logits.
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


# --- faults of a stream -------------------------------------------------------------------------


def faults_of(stream: Sequence[Entry], request: dict[str, Any]) -> set[str]:
    """Return which of "lost", "duplicated" and "gaps" one request's stream has."""
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
    """Return whether both runs of a request ended with the same tokens, texts and reasons."""

    def essence(entries: Sequence[Entry]) -> list[tuple[Any, ...]]:
        names = ("sample_index", "token_ids", "text", "finish_reason")
        return [tuple(each[name] for name in names) for each in entries[-1].output["samples"]]

    return essence(stream) == essence(undisturbed)


def difference(stream: Sequence[Entry], undisturbed: Sequence[Entry]) -> str:
    """Describe where the two runs differ."""
    parts = [f"epochs {sorted({entry.epoch for entry in stream})}"]
    pairs = zip(stream[-1].output["samples"], undisturbed[-1].output["samples"], strict=False)
    for ours, theirs in pairs:
        if ours != theirs:
            both = zip(ours["token_ids"], theirs["token_ids"], strict=False)
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))
            parts.append(
                f"sample {ours['sample_index']}: {same} of {len(theirs['token_ids'])} tokens "
                f"are equal, texts {ours['text'] == theirs['text']}, "
                f"{ours['finish_reason']} {theirs['finish_reason']}"
            )
    return "; ".join(parts)


def compare(
    requests: Sequence[dict[str, Any]],
    streams: Sequence[Sequence[Entry]],
    undisturbed: Sequence[Sequence[Entry]],
) -> dict[str, Any]:
    """Check each stream by itself, and against its undisturbed run."""
    results = []
    for request, stream, before in zip(requests, streams, undisturbed, strict=True):
        found = faults_of(stream, request)
        if "lost" in found:
            end = stream[-1].output if stream else {}
            results.append((found, f"{len(stream)} entries, {end.get('error')}"))
            continue
        if not same_samples(stream, before):
            sampled = request["sampling"]["temperature"] > 0
            found.add("mismatched_sampled" if sampled else "mismatched")
        results.append((found, difference(stream, before)))
    return chaos_rig.tally(results, FAULTS)


# --- faults of the pipeline ---------------------------------------------------------------------


class Chaos:
    """Faults, one after another, and when tokens flow again.

    Recovery from a stage's kill is the first token of a new epoch, from other faults the first
    token; only tokens of requests that were in flight count.
    """

    def __init__(
        self,
        deployment: Deployment,
        server: RedisServer,
        proxy: Proxy,
        load: Load,
        rng: random.Random,
    ) -> None:
        self._deployment, self._server, self._proxy = deployment, server, proxy
        self._load, self._rng = load, rng
        self.faults: list[Fault] = []
        self._open: list[tuple[int, int, set[int]]] = []  # fault, epoch to exceed, requests hit
        self.calm = asyncio.Event()
        self.calm.set()
        load.watcher = self._saw

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
            self.calm.set()

    async def hit(self, target: str) -> None:
        """Do one fault, and record its time."""
        if target == "redis":
            self._server.kill()
        elif target == "connections":
            self._proxy.cut(self._rng.choice((0.3, 1.0)), self._rng)
        elif target in RANK_SIGNALS:
            await self._deployment.hit_rank(RANK_SIGNALS[target], self._rng)
        elif target == STOPPED_LEADER:
            await self._deployment.kill("executor", signal.SIGSTOP)
        else:
            await self._deployment.kill(target)
        done = time.monotonic()
        of_stage = target not in ("redis", "connections")
        above = await self._load.epoch() if of_stage else -1
        if hit := self._load.in_flight:
            self._open.append((len(self.faults), above, hit))
            self.calm.clear()
        self.faults.append(Fault(target, done, None))
        if target == "redis":
            await asyncio.sleep(self._rng.uniform(0, 1.0))
            await self._server.start()


async def storm(
    folder: Path,
    ranks: int = 1,
    *,
    standby: bool = False,
    model: str = "tiny",
    **options: Any,
) -> dict[str, Any]:
    """Do both runs of a `Size`, and compare them; return the result file's content."""
    settings, targets = {**SETTINGS, "engine.model_path": model}, TARGETS
    if standby:
        settings = {**settings, "pipeline.standby": f"[{', '.join(STAGES)}]"}
    if ranks > 1:
        settings = {**settings, **RANK_SETTINGS, "engine.tensor_parallel": ranks}
        targets = (*TARGETS, *RANK_SIGNALS, STOPPED_LEADER)
    size = chaos_rig.Size(**options)
    rng = random.Random(size.seed)
    work = chaos_rig.make_requests(size.requests, size.seed, size.longest)
    redis_server = RedisServer(folder / "data", binary=size.server)
    proxy = Proxy(redis_server.port)
    async with AsyncExitStack() as stack:
        await redis_server.start()
        stack.callback(redis_server.kill)
        await proxy.start()
        stack.push_async_callback(proxy.aclose)
        deployment = await stack.enter_async_context(
            running_deployment(proxy.url, folder / "up.log", settings)
        )
        calm = Load(redis_server.url, PREFIX, "calm", work, size.concurrency)
        await chaos_rig.bounded(calm, deployment, size.duration_s)
        load = Load(redis_server.url, PREFIX, "storm", work, size.concurrency)
        chaos = Chaos(deployment, redis_server, proxy, load, rng)
        faults = chaos_rig.spread_faults(load, targets, size.kills, rng, chaos.hit, chaos.calm)
        ended = await chaos_rig.disturbed(load, deployment, size.duration_s, faults)
    return {
        **size.fields(),
        "standby": standby,
        "kills": dict(Counter(fault.target for fault in chaos.faults)),
        **compare(work, load.streams, calm.streams),
        "recovery_s": recovery(chaos.faults),
        "recovery_s_by_target": {target: recovery(chaos.faults, target) for target in targets},
        "not_recovered": sum(fault.recovered_at is None for fault in chaos.faults),
        **ended,
    }


def recovery(faults: Sequence[Fault], target: str = "") -> dict[str, float | None]:
    """Return p50 and p99 of the seconds from the faults of a target, or all, to recovery."""
    times = [
        fault.recovered_at - fault.at
        for fault in faults
        if fault.recovered_at is not None and target in ("", fault.target)
    ]
    return {
        f"p{share}": round(percentile(times, share / 100), 3) if times else None
        for share in (50, 99)
    }


def print_result(result: dict[str, Any], faults: Sequence[str]) -> None:
    columns = {"kills": "{kills}", "recovery p50, s": "{p50:.2f}", "p99, s": "{p99:.2f}"}
    by_target = result.get("recovery_s_by_target", {})
    rows = {
        target: {"kills": count, **by_target.get(target, {})}
        for target, count in result["kills"].items()
    }
    total = {"kills": sum(result["kills"].values()), **result.get("recovery_s", {})}
    print_table(columns, {**rows, "all": total}, "target")
    for name in ("requests", "completed", *faults, f"{faults[-1]}_sampled", "returns"):
        if name in result:
            print(f"{name:20}{result[name]:>10}")
    print(f"up survived: {result['up_survived']}; {result['wall_s']} s")
    for remark in result["remarks"]:
        print(f"  {remark}")


async def run(folder: Path, given: Any) -> dict[str, Any]:
    size = chaos_rig.size_of(given, given.kills)
    if given.http:
        return await http_storm(folder, SETTINGS, **size)
    more = {"standby": given.standby, "model": given.model}
    return await storm(folder, given.ranks, **more, **size)


def show(result: dict[str, Any]) -> None:
    print_result(result, FAULTS if FAULTS[-1] in result else HTTP_FAULTS)


def main() -> int:
    return chaos_rig.run_program(
        __doc__,
        run,
        show,
        requests=1000,
        kills=56,
        seed=1,
        concurrency=64,
        duration=(900.0, "limit of each run, seconds"),
        server=chaos_rig.SERVER,
        http=(False, "streams over two gateways"),
        ranks=(1, "ranks that share the model"),
        standby=(False, "a standby of each stage"),
        model=("tiny", "a model's folder"),
    )


if __name__ == "__main__":
    sys.exit(main())
