"""The needs of 1,000 lanes and 100,000 requests a second: laws, walls, shards, simulation.

    python benchmarks/scale_sim.py [--lanes 1000] [--rate 100000] [--rounds 5] [--json FILE]

1. The parts that all lanes share, each measured on one node (scale_laws.py), and the laws fitted.
2. What each part can carry by its law, with the law's error: the walls, and what moves them.
3. The path of a request over 1, 4 and 16 shards, a server each: processor time per request, and the
   requests per second that these servers reach together on this machine.
4. A virtual clock: requests of 10,000 tenants go to shards and lanes by the package's own
   functions, wait there as the laws say, and run on some lanes through the cores of fairness and
   batching.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from fairness_model import SECOND, Arrival, Device, Simulation
from harness import markdown, options, percentile, record
from scale_laws import BODY, GROUP, Law, Node, measure, median_spread, node, packed, script

from nano_inference.bus.redis import leases
from nano_inference.bus.shards import READERS, homes_of, shard_of
from nano_inference.config import FairnessConfig
from nano_inference.store.redis.keys import Keys

PROCESSES = 5
"""Processes of a lane: each reports, and counts the queue, once a second."""

BATCH = 8
"""Entries that a busy lane takes and acknowledges together."""

LEASE_S = 30.0
TENANTS = 10_000
SKEW = 0.8
"""Exponent of Zipf's law: the k-th tenant has a share of 1 / k ** SKEW."""


class Parts:
    """Use of nodes by the laws, in cores."""

    def __init__(self, laws: dict[str, Law], lanes: int) -> None:
        self.laws, self.lanes = laws, lanes

    def request_us(self, readers: float) -> tuple[float, float]:
        """Return what a request costs the node of its shard, and the error."""
        parts = [
            (self.laws["publish and take"], readers, 1.0),
            (self.laws["acknowledge"], BATCH, 1 / BATCH),
        ]
        cost = sum(law.at(x) * share for law, x, share in parts)
        return cost, sum(law.error(x) * share for law, x, share in parts)

    def first_node(self, lanes: float, count: str) -> float:
        """Return the use of the first shard's node without any request, in cores."""
        laws = self.laws
        each_s = PROCESSES * laws[count].at(lanes)
        each_s += laws["renew"].at(lanes) * 3 / LEASE_S
        each_s += laws["check the queue"].at(lanes) + 10 * laws["look at the layout"].at(1)
        return lanes * each_s / 1e6

    def lanes_until_full(self, count: str) -> float:
        """Return the number of lanes that fill the first node without any request."""
        low, high = 1.0, 1e7
        while high / low > 1.001:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self.first_node(middle, count) < 1 else (low, middle)
        return low


def walls(parts: Parts, rate: int) -> list[dict[str, Any]]:
    """Return what each shared part carries, lowest first."""
    laws, lanes = parts.laws, parts.lanes
    rows: list[dict[str, Any]] = []

    def add(part: str, unit: str, limit: float, error: float, wanted: float, moved_by: str) -> None:
        rows.append(
            {
                "part": part,
                "unit": unit,
                "limit": limit,
                "error": error,
                "wanted": wanted,
                "use": wanted / limit,
                "moved_by": moved_by,
            }
        )

    def per_second(cost_us: float, error_us: float) -> tuple[float, float]:
        return 1e6 / cost_us, 1e6 / cost_us * error_us / cost_us

    every = parts.request_us(lanes)
    few = parts.request_us(READERS)
    add(
        "one requests stream, at which all lanes wait",
        *("requests/s", *per_second(*every), rate),
        f"shards: at each wait {READERS} lanes, or its share of all lanes",
    )
    add(
        f"one requests stream, {READERS} lanes wait",
        *("requests/s", *per_second(*few), rate),
        "shards (`bus.shards`), each on a node",
    )
    for shards in (4, 16, 64):
        readers = max(READERS, lanes / shards)
        limit, error = per_second(*parts.request_us(readers))
        add(
            f"{shards} shards, {readers:.0f} lanes wait at each",
            *("requests/s", shards * limit, shards * error, rate),
            "more shards, up to 64" if shards < 64 else "the largest tenant is next",
        )
    top = 1 / sum(1 / k**SKEW for k in range(1, TENANTS + 1))
    limit, error = per_second(*few)
    add(
        f"a tenant with {100 * top:.1f} % of the requests, on its shard",
        *("requests/s", limit / top, error / top, rate),
        "several names for one tenant (it gives up its order)",
    )
    for name, words, moved_by in (
        ("count, sum", "first node, every process adds up all lanes", "one sum a second for all"),
        ("count, shared", "first node, one sum for all", "a registry for each shard"),
    ):
        add(words, "lanes", parts.lanes_until_full(name), 0.0, lanes, moved_by)
    told = laws["tell, in a cluster"]
    add(
        "one results stream",
        *("requests/s", *per_second(told.at(1), told.error(1)), rate),
        "its shards, with those of the requests",
    )
    report = laws["report of a process"]
    limit, error = per_second(report.at(1) * PROCESSES, report.error(1) * PROCESSES)
    add("the board of reports", "lanes", limit, error, lanes, "a stream for each shard of lanes")
    move, publish = laws["move, router"], laws["publish, nobody waits"]
    limit, error = per_second(move.at(64) / 64 + publish.at(1), move.error(64) / 64)
    add(
        "the entrance of several models",
        *("requests/s", limit, error, rate),
        "clients that name their model publish past it",
    )
    reserve = laws["reserve a limit"]
    gateways = 64
    limit, error = per_second(reserve.at(gateways) / 100, reserve.error(gateways) / 100)
    add(
        f"a limit shared by {gateways} gateways, 100 calls a write",
        *("requests/s", limit, error, rate),
        "limits of other tenants, on nodes of their own",
    )
    fence = laws["recover a stream"]
    limit, error = per_second(fence.at(1), fence.error(1))
    add(
        "recovery after a failure, on one node of outputs",
        *("requests replayed/s", limit, error, 100.0 * 100),
        "outputs are on all nodes",
    )
    return sorted(rows, key=lambda row: -row["use"])


# --- real shards ------------------------------------------------------------------------------


def path_over(shards: int, requests: int) -> dict[str, Any]:
    """Publish, take and acknowledge requests of many tenants on a server for each shard."""
    keys = [Keys("nano", shard=shard) for shard in range(shards)]
    with contextlib.ExitStack() as stack:
        nodes: list[Node] = [stack.enter_context(node()) for _ in keys]
        for found, named in zip(nodes, keys, strict=True):
            found.redis.xgroup_create(named.requests, GROUP, "0", mkstream=True)
        on = [shard_of(f"tenant-{i % TENANTS}", shards) for i in range(requests)]
        before = [found.cpu_s() for found in nodes]
        began = time.perf_counter()
        # All servers work at once: a round sends to each of them before it waits for any.
        for start in range(0, requests, 64 * shards):
            some = on[start : start + 64 * shards]
            for shard in range(shards):
                number = some.count(shard)
                if number:
                    round_trip(nodes[shard], keys[shard], number)
        wall_s = time.perf_counter() - began
        used = [found.cpu_s() - each for found, each in zip(nodes, before, strict=True)]
    most = max(used)
    return {
        "shards": shards,
        "wall_requests_per_s": requests / wall_s,
        "server_us_per_request": sum(used) / requests * 1e6,
        "busiest_share": most / sum(used),
        "requests_per_s_of_nodes": requests / most,
    }


def round_trip(found: Node, keys: Keys, number: int) -> None:
    """Publish entries, take them in batches, and acknowledge them."""
    found.send([packed("XADD", keys.requests, "*", "json", BODY)] * number)
    taken: list[bytes] = []
    while len(taken) < number:
        reply: Any = found.redis.xreadgroup(
            GROUP, "admission-0", {keys.requests.decode(): ">"}, count=BATCH
        )
        entries = reply[keys.requests][0] if isinstance(reply, dict) else reply[0][1]
        taken += [entry_id for entry_id, _ in entries]
    found.send(
        [
            script(
                leases._ACKNOWLEDGE,
                [keys.requests],
                *(GROUP, "admission-0", *taken[start : start + BATCH]),
            )
            for start in range(0, number, BATCH)
        ]
    )


# --- the virtual clock ------------------------------------------------------------------------


def simulate(
    parts: Parts, rate: int, shards: int, *, all_wait: bool, run: int, seconds: float
) -> dict[str, Any]:
    """Send requests through the shards, and through the cores of some lanes."""
    rng = random.Random(1)
    lanes = parts.lanes
    readers: list[list[int]] = [[] for _ in range(shards)]
    for lane in range(lanes):
        for home in range(shards) if all_wait else homes_of(f"lane-{lane}", shards, lanes):
            readers[home].append(lane)
    cost_ns = [parts.request_us(len(each))[0] * 1e3 for each in readers]
    cost_ns[0] /= max(0.01, 1 - parts.first_node(lanes, "count, shared"))
    turns = [itertools.cycle(each) for each in readers]
    names = [f"tenant-{i}" for i in range(TENANTS)]
    weights = list(itertools.accumulate(1 / k**SKEW for k in range(1, TENANTS + 1)))
    number = int(rate * seconds)
    tenants = rng.choices(names, cum_weights=weights, k=number)
    free_ns = [0.0] * shards
    used_ns = [0.0] * shards
    delays: list[float] = []
    of_lane: dict[int, list[Arrival]] = {lane: [] for lane in range(lanes)}
    at_ns = 0.0
    for tenant in tenants:
        at_ns += rng.expovariate(rate) * SECOND
        shard = shard_of(tenant, shards)
        done_ns = max(free_ns[shard], at_ns) + cost_ns[shard]
        used_ns[shard] += cost_ns[shard]
        free_ns[shard] = done_ns
        delays.append((done_ns - at_ns) / 1e6)
        lengths = rng.randint(32, 256), rng.randint(16, 64)
        of_lane[next(turns[shard])].append(Arrival(int(done_ns), tenant, *lengths))
    found = lanes_of(rng.sample(range(lanes), run), of_lane)
    numbers = [len(each) for each in of_lane.values()]
    return {
        "shards": shards,
        "all_wait": all_wait,
        "rate": rate,
        "readers": statistics.mean(map(len, readers)),
        "busiest": max(used_ns) / SECOND / seconds,
        "mean": statistics.mean(used_ns) / SECOND / seconds,
        "delay_ms_p50": percentile(delays, 0.5),
        "delay_ms_p99": percentile(delays, 0.99),
        "lane_most_over_mean": max(numbers) / statistics.mean(numbers),
        **found,
    }


def lanes_of(chosen: Sequence[int], of_lane: dict[int, list[Arrival]]) -> dict[str, Any]:
    """Run the arrivals of some lanes through the cores of fairness and batching."""
    waits: list[float] = []
    began, number = time.process_time(), 0
    for lane in chosen:
        simulation = Simulation("ours", FairnessConfig(), Device())
        outcome = simulation.run(of_lane[lane])
        waits += [each.ttft_ns / 1e6 for each in outcome.records]
        number += len(outcome.records)
    return {
        "ttft_ms_p50": percentile(waits, 0.5) if waits else None,
        "ttft_ms_p99": percentile(waits, 0.99) if waits else None,
        "core_us_per_request": (time.process_time() - began) / max(1, number) * 1e6,
    }


# --- the program ------------------------------------------------------------------------------


def law_row(name: str, law: Law) -> dict[str, Any]:
    return {
        "part": name,
        "of": law.of,
        "coefficients": law.coefficients,
        "errors": [2 * law.covariance[i][i] ** 0.5 for i in range(len(law.coefficients))],
        "deviation": median_spread(law),
        "measured_to": max(x for x, _ in law.points),
        "points": law.points,
    }


def main() -> None:
    parser = options(__doc__, lanes=1000, rate=100_000, rounds=5, requests=20_000, seconds=1.0)
    arguments = parser.parse_args()
    load = os.getloadavg()
    laws = measure(arguments.rounds)
    rows = [law_row(name, law) for name, law in laws.items()]
    print(markdown(["part", "us", "of"], [[r["part"], r["coefficients"], r["of"]] for r in rows]))
    parts = Parts(laws, arguments.lanes)
    found = walls(parts, arguments.rate)
    for row in found:
        print(f"{row['limit']:12,.0f} +- {row['error']:8,.0f} {row['unit']:20} {row['part']}")
    shards = [path_over(number, arguments.requests) for number in (1, 4, 16)]
    for row in shards:
        print(row)
    simulated = []
    for number, all_wait in ((1, True), (4, False), (16, True), (16, False), (64, False)):
        for rate in (arguments.rate // 100, arguments.rate // 10, arguments.rate):
            run, seconds = min(10, arguments.lanes), arguments.seconds
            row = simulate(parts, rate, number, all_wait=all_wait, run=run, seconds=seconds)
            simulated.append(row)
            print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()})
    state = {"load_before": load, "load_after": os.getloadavg()}
    record(arguments, laws=rows, walls=found, path=shards, simulated=simulated, state=state)


if __name__ == "__main__":
    main()
