"""Bad days: faults of every kind under requests of every kind, over HTTP, gRPC and Redis.

    python benchmarks/chaos_days.py [--requests 10000] [--faults 300] [--seed S] [--json FILE]
                                    [--deployments redis,lanes,sentinel,cluster,ranks,chats,hosts]
                                    [--concurrency C] [--duration SECONDS]

Seven deployments, each with the share of requests and faults of its kinds (chaos_faults.py): one
Redis server with two replicas, two lanes, a master with its replica and three sentinels, a cluster,
a model over two ranks, gateways with keys and guardrails, and two hosts (chaos_hosts.py). With
`--deployments` only these run, with the same shares; the others keep their results in FILE.

Each request is answered undisturbed first (interfaces.py has the requests), and again under faults.
A request that is lost, doubled, has gaps or differs counts for the last fault that came before its
end. Recovery is the time from the fault until the next answer of a request that was in flight, and
until the last of them.

The exit status is 1 unless nothing was lost, doubled, incomplete or different. Linux, root, a C
compiler, faketime.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import chaos_hosts
import chaos_rig
import redis
from chaos_day import Day
from chaos_faults import DEPLOYMENTS
from chaos_rig import Clients
from harness import percentile, print_table, write
from interfaces import KINDS, Answer, Ask, Interfaces, make_asks
from soak_ledger import Judge

WRONG = ("lost", "doubled", "gaps", "different")
OF_SOME = ("guest", "second", "tool", "reasoning", "guardrail", "background")
"""Kinds of requests that not every deployment has."""
HOSTS_SHARE = 8
"""Kinds of faults that chaos_hosts.py has."""


class InterfacesLoad(Clients):
    """Requests through their interfaces.

    Attributes:
        in_flight: By request, when it was sent.
        ended: When each was sent and ended, and what is wrong with it.
    """

    def __init__(
        self, interfaces: Interfaces, judge: Judge, asks: Sequence[Ask], concurrency: int
    ) -> None:
        super().__init__([ask.request for ask in asks], concurrency)
        self._interfaces, self._judge, self._asks = interfaces, judge, asks
        self.learns = False
        self.in_flight: dict[int, float] = {}
        self.ended: dict[int, tuple[float, float, set[str]]] = {}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            async for index in self.in_turn():
                group.create_task(self._one(index))

    async def _one(self, index: int) -> None:
        ask = self._asks[index]
        self.in_flight[index] = start = time.monotonic()
        answer: Answer = await self._interfaces.send(ask, "days")
        del self.in_flight[index]
        wrong: set[str] = set()
        if not self.learns:
            wrong = self._judge.take(ask, answer)
        elif ask.kind != "leaving":
            self._judge.learn(ask, answer)
        self.ended[index] = (start, time.monotonic(), wrong)
        async with self._changed:
            self.finished += 1
            self._changed.notify_all()


async def one_deployment(
    folder: Path, name: str, requests: int, faults: int, size: Any
) -> dict[str, Any]:
    """Run the requests in one deployment, undisturbed and under faults."""
    rng = random.Random(size.seed)
    async with AsyncExitStack() as stack:
        day: Day = await stack.enter_async_context(DEPLOYMENTS[name](folder, rng))
        kinds = list(day.faults)
        judge = Judge()
        interfaces = await stack.enter_async_context(day.interfaces())
        places = [interface for interface in ("redis",) if interfaces.redis is None]
        known = make_asks(
            min(requests, size.known),
            size.seed,
            longest=size.longest,
            kinds=[
                each for each in KINDS if each in day.also or each not in (*OF_SOME, *day.without)
            ],
            interfaces=[interface for interface in day.all_interfaces if interface not in places],
        )
        calm = InterfacesLoad(interfaces, judge, known, size.concurrency)
        calm.learns = True
        await chaos_rig.bounded(calm, day, size.duration)  # type: ignore[arg-type]
        asks = [known[index % len(known)] for index in range(requests)]
        rng.shuffle(asks)
        load = InterfacesLoad(interfaces, judge, asks, size.concurrency)
        hits: list[tuple[str, float, float, set[int]]] = []

        async def hit(kind: str) -> None:
            at, flying = time.monotonic(), set(load.in_flight)
            print(f"{time.strftime('%H:%M:%S')} {name}: {kind}, {load.finished} ended", flush=True)
            try:
                await day.faults[kind]()
            except (OSError, RuntimeError, AssertionError, redis.RedisError) as error:
                day.remarks.append(f"the fault {kind!r} could not be made: {error!r}")
            hits.append((kind, at, time.monotonic(), flying))

        spread = chaos_rig.spread_faults(load, kinds, faults, rng, hit)
        ended = await chaos_rig.disturbed(load, day, size.duration, spread)  # type: ignore[arg-type]
        await day.look()
        remarks = [*judge.remarks, *day.remarks]
    missing = len(asks) - len(load.ended)
    return {
        "requests": requests,
        "never ended": missing,
        "kinds": table(hits, load),
        "before any fault": sum(bool(each[2]) for each in load.ended.values()) * (not hits),
        **{key: dict(count) for key, count in judge.counts.items()},
        "remarks": remarks[:50],
        **ended,
    }


def table(
    hits: Sequence[tuple[str, float, float, set[int]]], load: InterfacesLoad
) -> dict[str, Any]:
    """Return a row for each kind of fault."""
    rows: dict[str, Any] = {}
    of_fault: dict[int, list[set[str]]] = {}
    for _, end, wrong in load.ended.values():
        if wrong:
            last = max((place for place, hit in enumerate(hits) if hit[1] <= end), default=0)
            of_fault.setdefault(last, []).append(wrong)
    for kind in dict.fromkeys(hit[0] for hit in hits):
        mine = [(place, hit) for place, hit in enumerate(hits) if hit[0] == kind]
        first, last = [], []
        for _, (_, at, _, flying) in mine:
            ends = [load.ended[index][1] - at for index in flying if index in load.ended]
            if ends:
                first.append(min(ends))
                last.append(max(ends))
        found = [wrong for place, _ in mine for wrong in of_fault.get(place, [])]
        rows[kind] = {
            "number": len(mine),
            **{name: sum(name in wrong for wrong in found) for name in WRONG},
            "next_s": quantiles(first),
            "all_s": quantiles(last),
        }
    return rows


def quantiles(times: Sequence[float]) -> dict[str, float] | None:
    """Return p50 and p99; None without times."""
    if not times:
        return None
    found = {"p50": statistics.median(times), "p99": percentile(times, 0.99)}
    return {name: round(value, 2) for name, value in found.items()}


async def of_hosts(folder: Path, requests: int, faults: int, size: Any) -> dict[str, Any]:
    """Run chaos_hosts.py; its faults of each kind, and what is wrong of all of them."""
    found = await chaos_hosts.storm(
        folder,
        requests=max(requests * 2 // 3, 10),
        kills=faults,
        seed=size.seed,
        concurrency=size.concurrency,
        longest=size.longest,
        duration_s=size.duration,
    )
    parts = (found["redis"], found["http"])
    # The settings are deterministic, so sampled streams must be the same, too.
    names = {
        "lost": ("lost",),
        "doubled": ("duplicated", "doubled"),
        "gaps": ("gaps",),
        "different": ("mismatched", "mismatched_sampled", "different", "different_sampled"),
    }
    whole = {
        name: sum(part.get(each, 0) for part in parts for each in others)
        for name, others in names.items()
    }
    kinds = {f"hosts: {kind}": {"number": count} for kind, count in found["faults"].items()}
    return {
        "requests": found["requests"] + found["http"]["requests"],
        "never ended": 0,
        "kinds": kinds,
        "wrong": whole,
        "remarks": [*found["redis"]["remarks"], *found["http"]["remarks"]],
        "up_survived": found["up_survived"],
        "wall_s": found["wall_s"],
        "dropped_packets": found["dropped_packets"],
    }


async def days(folder: Path, size: Any) -> dict[str, Any]:
    """Run the deployments one after the other; return the result file's content."""
    counts = {
        name: len(DEPLOYMENTS[name].KINDS) if name in DEPLOYMENTS else HOSTS_SHARE for name in ALL
    }
    whole = sum(counts.values())
    result: dict[str, Any] = {"deployments": {}}
    if size.json is not None and size.json.exists():
        result["deployments"] = json.loads(size.json.read_text())["deployments"]
    for name in size.deployments:
        faults = max(counts[name] * size.least, math.ceil(size.faults * counts[name] / whole))
        requests = math.ceil(size.requests * counts[name] / whole)
        run: Callable[..., Any] = of_hosts if name == "hosts" else one_deployment
        parts = (requests, faults, size) if name == "hosts" else (name, requests, faults, size)
        found = await run(new(folder / name), *parts)
        own = {"seed": size.seed, "concurrency": size.concurrency}
        result["deployments"][name] = own | found
        write(size.json, result)
    result["deployments"] = {
        name: result["deployments"][name] for name in ALL if name in result["deployments"]
    }
    deployments = result["deployments"].values()
    result["clean"] = not any(
        found["never ended"] or any(found["wrong"].values()) for found in deployments
    )
    result["up_survived"] = all(found["up_survived"] for found in deployments)
    return result


def new(folder: Path) -> Path:
    """Return a folder, made."""
    folder.mkdir(parents=True)
    return folder


def show(result: dict[str, Any]) -> None:
    columns = {"number": "{number}", **{name: f"{{{name}}}" for name in WRONG}}
    columns |= {
        "next p50, s": "{next_s[p50]}",
        "p99, s": "{next_s[p99]}",
        "all p50, s": "{all_s[p50]}",
        "all p99, s": "{all_s[p99]}",
    }
    rows = {}
    for found in result["deployments"].values():
        rows |= found["kinds"]
    print_table(columns, rows, "fault")
    for name, found in result["deployments"].items():
        print(
            f"{name}: {found['requests']} requests, {found['never ended']} never ended, "
            f"wrong {found['wrong']}, up survived {found['up_survived']}, {found['wall_s']} s"
        )
        for remark in found["remarks"]:
            print(f"  {remark}")


ALL = (*DEPLOYMENTS, "hosts")


def main() -> int:
    return chaos_rig.run_program(
        __doc__,
        days,
        show,
        requests=10_000,
        faults=300,
        least=(1, "faults of each kind at least"),
        deployments=([*ALL], f"of {', '.join(ALL)}"),
        known=(300, "different requests of a deployment"),
        seed=1,
        concurrency=16,
        longest=(60, "most tokens of a sample"),
        duration=(3600.0, "limit of a deployment, seconds"),
    )


if __name__ == "__main__":
    sys.exit(main())
