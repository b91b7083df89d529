"""Two hosts with clocks hours apart, under partitions, delay and loss: no stream may be damaged.

    python benchmarks/chaos_hosts.py [--requests N] [--faults K] [--seed S] [--json FILE]
                                     [--concurrency C] [--duration SECONDS] [--clock OFFSET]

Network namespaces are the hosts (hosts_net.py): `a` has the lane "a" with its replica that
prefills, `b` the replica of that lane that decodes, which reads KV over TCP, and all of the lane
"b". Each lane has a gateway. Redis and the clients are on a third. `b`'s clock is ahead. Requests
over Redis and SSE streams over both gateways run once undisturbed, then while links are cut for
some seconds, in both directions or in one, or are slow and lose packets. Many a cut lasts longer
than the lease of a lane, so that the other lane takes over, and the one that was cut off returns.

The exit status is 1 unless no stream was lost, doubled, incomplete or different. Linux, root,
iproute2, faketime.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import chaos
import chaos_http
import chaos_rig
import httpx
from chaos_http import HttpLoad
from chaos_rig import Load, RedisServer
from harness import print_table, wait_until_answered
from hosts_net import CENTRE, Network

LEASE_S = 3.0
LONGEST_CUT_S = 8.0
SETTINGS: dict[str, object] = {
    **chaos.SETTINGS,
    "bus.prefix": "nano-benchmark-hosts",
    "admission.lease_s": LEASE_S,
    "engine.deterministic": True,
    "fairness.exchange_interval_s": 0.5,
}
SPLIT: dict[str, object] = {
    "bus.lane": "a",
    "pipeline.replicas": 2,
    "pipeline.roles": ["prefill", "decode"],
    "engine.kv_secret": "of the benchmark, which has no other",
    "engine.block_size": 8,
}
PORT, METRICS = 8000, 9464
START_S = 600.0
"""The longest time to start, on a machine that is busy with other work."""


class Kind(NamedTuple):
    """A fault of some wires: those that are cut, and the delay and loss of the others."""

    wires: tuple[tuple[str, str], ...]
    is_cut: bool = True


def both(one: str, other: str) -> tuple[tuple[str, str], ...]:
    return (one, other), (other, one)


FAULTS: dict[str, Kind] = {
    "a cut off": Kind((*both("a", CENTRE), *both("a", "b"))),
    "b cut off": Kind((*both("b", CENTRE), *both("a", "b"))),
    "a and b apart": Kind(both("a", "b")),
    "a sends nothing": Kind((("a", CENTRE), ("a", "b"))),
    "a receives nothing": Kind(((CENTRE, "a"), ("b", "a"))),
    "b sends nothing": Kind((("b", CENTRE), ("b", "a"))),
    "b receives nothing": Kind(((CENTRE, "b"), ("a", "b"))),
    "delay and loss": Kind((*both("a", CENTRE), *both("b", CENTRE), *both("a", "b")), is_cut=False),
}


class Hosts:
    """All processes of both hosts."""

    def __init__(self, network: Network, url: str, folder: Path, clock: str) -> None:
        self._network, self._url, self._folder, self._clock = network, url, folder, clock
        self.processes: list[Any] = []
        self.process = self  # what `chaos_rig.bounded` looks at

    def poll(self) -> int | None:
        """Return the status of a process that has ended; None while all run."""
        ended = (process.poll() for process in self.processes)
        return next((status for status in ended if status is not None), None)

    async def start(self) -> None:
        """Start all, and wait until both gateways are ready."""
        for index, host in enumerate("ab"):
            address = self._network.address(host)
            listens = {"gateway.host": address, "gateway.port": PORT, "gateway.insecure": True}
            split = {**SPLIT, "pipeline.replica": index, "engine.kv_listen": f"{address}:0"}
            if host == "a":
                log = self._run(host, "lane-a", "serve", **split, **listens)
                # With compiled kernels: under libfaketime the compiler fails at times, and without
                # kernels an executor computes other bits.
                await asyncio.to_thread(self._wait_until_loaded, log)
            else:
                split |= {"telemetry.metrics_port": METRICS, "telemetry.metrics_host": address}
                self._run(host, "decode", "run", "--stages", "batching,executor", **split)
                self._run(host, "lane-b", "serve", **{"bus.lane": "b"}, **listens)
        for host, process in zip("ab", (self.processes[0], self.processes[-1]), strict=True):
            await asyncio.to_thread(
                wait_until_answered, f"{self.gateway(host)}/readyz", process, limit_s=START_S
            )

    def _wait_until_loaded(self, log: Path) -> None:
        """Wait until an executor has loaded its model, as its log says."""
        end = time.monotonic() + START_S
        while "model_loaded" not in log.read_text(errors="replace"):
            if self.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"no model is loaded; see {log}")
            time.sleep(0.2)

    async def transfers(self) -> int:
        """Return the number of transfers of KV over TCP, from host a to host b."""
        async with httpx.AsyncClient(timeout=60.0) as client:
            url = f"http://{self._network.address('b')}:{METRICS}/metrics"
            text = (await client.get(url)).text
        counts = re.findall(r"^nano_kv_transfer_duration_seconds_count(.*) (\S+)$", text, re.M)
        return round(sum(float(count) for labels, count in counts if '"tcp"' in labels))

    def gateway(self, host: str) -> str:
        return f"http://{self._network.address(host)}:{PORT}"

    def _run(self, host: str, name: str, *command: str, **settings: object) -> Path:
        log = self._folder / f"{host}-{name}.log"
        clock = self._clock if host == "b" else ""
        command = (*command, "--bus", self._url)
        started = self._network.start(host, log, *command, clock=clock, **{**SETTINGS, **settings})
        self.processes.append(started)
        return log

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def logs_of(folder: Path) -> list[Path]:
    return list(folder.glob("*.log"))


async def storm(folder: Path, clock: str = "+5h", **given: Any) -> dict[str, Any]:
    """Do both runs, and compare them; return the result file's content."""
    size = chaos_rig.Size(**given)
    rng = random.Random(size.seed)
    work = chaos_rig.make_requests(size.requests, size.seed, size.longest)
    bodies = chaos_http.make_bodies(size.requests // 2, size.seed + 1, size.longest)
    prefix = str(SETTINGS["bus.prefix"])
    done: Counter[str] = Counter()
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(Network("a", "b", seed=size.seed))
        server = RedisServer(folder / "data", binary=size.server, address=network.address(CENTRE))
        await server.start()
        stack.callback(server.kill)
        hosts: Any = Hosts(network, server.url, folder, clock)
        stack.callback(hosts.kill)
        await hosts.start()
        urls = [hosts.gateway(host) for host in "ab"]

        def loads(name: str) -> tuple[Load, HttpLoad]:
            return (
                Load(server.url, prefix, name, work, size.concurrency),
                HttpLoad(name, bodies, urls, max(1, size.concurrency // 2)),
            )

        async def hit(name: str) -> None:
            kind = FAULTS[name]
            for pair in kind.wires:
                wire = network.wires[pair]
                wire.is_cut = kind.is_cut
                if not kind.is_cut:
                    wire.delay_s, wire.loss = rng.uniform(0.01, 0.06), rng.uniform(0.01, 0.05)
            done[name] += 1
            await asyncio.sleep(rng.uniform(0.5, LONGEST_CUT_S))
            network.heal()

        async def together(pair: tuple[Load, HttpLoad], faults: Any = None) -> dict[str, Any]:
            over_http = asyncio.create_task(chaos_rig.bounded(pair[1], hosts, size.duration_s))
            start = time.monotonic()
            if faults is None:
                await chaos_rig.bounded(pair[0], hosts, size.duration_s)
                ended = {}
            else:
                ended = await chaos_rig.disturbed(pair[0], hosts, size.duration_s, faults)
            network.heal()
            await over_http
            return {**ended, "wall_s": round(time.monotonic() - start, 1)}

        calm, load = loads("calm"), loads("storm")
        undisturbed_s = (await together(calm))["wall_s"]
        network.dropped = 0
        faults = chaos_rig.spread_faults(load[0], tuple(FAULTS), size.kills, rng, hit)
        ended = await together(load, faults)
        ended["kv_transfers_over_tcp"] = await hosts.transfers()
        ended["dropped_packets"] = network.dropped
    told = {log.stem: log.read_text(errors="replace") for log in logs_of(folder)}
    over_redis = chaos.compare(work, load[0].streams, calm[0].streams)
    over_http = chaos_http.compared(load[1].readings, calm[1].readings, bodies)
    return {
        **size.fields(),
        "clock": clock,
        "faults": dict(done),
        "redis": over_redis,
        "http": {"requests": len(bodies), **over_http},
        "clean": over_redis["clean"] and over_http["clean"],
        "taken_over": sum(
            len(re.findall("requests_gone_to_another", log)) for log in told.values()
        ),
        "undisturbed_s": undisturbed_s,
        **ended,
    }


async def run(folder: Path, given: Any) -> dict[str, Any]:
    return await storm(folder, given.clock, **chaos_rig.size_of(given, given.faults))


def show(result: dict[str, Any]) -> None:
    columns = {name: f"{{{name}}}" for name in ("requests", "completed", "lost", "clean")}
    rows = {"redis": {"requests": result["requests"], **result["redis"]}, "http": result["http"]}
    print_table(columns, rows, "streams over")
    for name in (
        "faults",
        "dropped_packets",
        "kv_transfers_over_tcp",
        "taken_over",
        "undisturbed_s",
        "wall_s",
    ):
        print(f"{name:24}{result[name]}")
    for each in ("redis", "http"):
        for remark in result[each]["remarks"]:
            print(f"  {each} {remark}")


def main() -> int:
    return chaos_rig.run_program(
        __doc__,
        run,
        show,
        requests=120,
        faults=16,
        seed=1,
        concurrency=16,
        duration=(600.0, "limit of each run, seconds"),
        longest=(80, "most tokens of a sample"),
        clock=("+5h", "what the clock of host b is ahead"),
    )


if __name__ == "__main__":
    sys.exit(main())
