"""A deployment under mixed load for hours: nothing is lost or wrong, and nothing grows.

    python benchmarks/soak.py [--hours H] [--rate R] [--concurrency C] [--faults PER_MINUTE]
                              [--seed S] [--replays N] [--json FILE] [--plot FILE] [--keep FOLDER]

`nano-inference up` over Redis, with two replicas of the bundled vision model, a second model, and a
gateway. Requests of every kind come through every interface (interfaces.py): a part of them has
been answered before, undisturbed and under both sets of weights, the others have prompts of their
own. Meanwhile weights change, an adapter and the second model are loaded and unloaded, clients
leave, and processes are killed (SIGKILL), terminated (SIGTERM) and stopped for some seconds
(SIGSTOP). The second half is without such faults.

Each request must have one terminal message, without gaps and doubled tokens, and the tokens of its
undisturbed run, sampled ones too; times add up to the nanosecond. At the end random requests are
replayed and must be equal to the bit. Memory, descriptors, threads, keys and files must have no
growth after the warm-up (soak_watch.py). The exit status is 1 otherwise. Linux only; `--plot`
needs the extra `plots`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import chaos_rig
import mixed_requests
import redis.asyncio
import time_checks
import torch
import yaml
from chaos_rig import RedisServer, start_command
from harness import (
    descendants,
    free_port,
    print_table,
    stop,
    wait_until_answered,
    write,
)
from interfaces import GUEST, SECOND, Ask, Interfaces, make_asks
from safetensors.torch import load_file, save_file
from soak_ledger import LABELS, Judge, Ledger, label_of, versions_of
from soak_watch import PSS, Watch, role_of, trends

from nano_inference import BusClient, Completion
from nano_inference.bus.weights import FolderWeights
from nano_inference.config import BusConfig, EngineConfig, NanoInferenceError

PREFIX = "nano-benchmark-soak"
MAIN = "main"
STAGES = ("admission", "fairness", "batching", "batching.1", "executor", "executor.1", "streaming")
SIGNALS = {"killed": signal.SIGKILL, "terminated": signal.SIGTERM, "stopped": signal.SIGSTOP}
FAULTS = [
    *itertools.product((*STAGES, "gateway"), SIGNALS),
    ("forks", "killed"),
    ("forks with torch", "killed"),
]
MOST_TENANTS = 12
METRICS_PORT = 21_000 + os.getpid() % 500 * 20
"""The first of all processes' ports: below those that the system gives to connections."""
START_S = 600.0
"""The longest time to start, on a machine that is busy with other work."""


def settings(url: str, folder: Path) -> dict[str, Any]:
    """Return the settings of the deployment."""
    return {
        "bus": {"url": url, "prefix": PREFIX, "results_ttl_s": 60, "results_maxlen": 2000},
        "engine": {
            "dtype": "float32",
            "deterministic": True,
            "kv_cache_bytes": 4 << 20,  # small, so that blocks are evicted and sequences preempted
            "max_model_len": 512,
        },
        "pipeline": {"max_restarts": 100_000, "restart_backoff_s": 0.02},
        "admission": {"max_lane_deaths": 1000},
        "telemetry": {"log_level": "info", "metrics_port": METRICS_PORT},
        "models": [
            {
                "id": MAIN,
                "path": mixed_requests.MODEL,
                "replicas": 2,
                "default": True,
                "adapters": {mixed_requests.ADAPTER: str(folder / "adapter")},
            },
            {"id": SECOND, "path": "tiny", "preload": False},
        ],
    }


def write_weights(folder: Path) -> dict[str, str]:
    """Write the folders of both sets of weights; return them by label."""
    source = EngineConfig(model_path=mixed_requests.MODEL).model_folder
    other = folder / "weights"
    shutil.copytree(source, other)
    tensors = load_file(source / "model.safetensors")
    norm = tensors["language_model.model.norm.weight"]
    norm *= 1 + 0.3 * torch.sin(torch.arange(len(norm)))
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    return {"A": str(source), "B": str(other)}


# --- what happens -------------------------------------------------------------------------------


class Changes:
    """Changes of weights, an adapter and a model, while requests run.

    Attributes:
        done: Their number, by kind.
        failed: Those that were refused, for instance since a process died meanwhile.
    """

    def __init__(self, client: BusClient, main: BusClient, folder: Path) -> None:
        self._client, self._main, self._folder = client, main, folder
        self._weights = write_weights(folder)
        self._version = 0
        self._changes: list[tuple[float, float]] = []
        self._modes = itertools.cycle(("keep", "retract"))
        self.done: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    def crossed(self, start_s: float, end_s: float) -> bool:
        """Return whether weights have changed between two times."""
        return any(start <= end_s and end >= start_s for start, end in self._changes[-50:])

    async def weights(self, label: str = "") -> None:
        """Put weights in place, by default the other ones."""
        label = label or LABELS[1 - LABELS.index(label_of(self._version))]
        version = self._version + 1
        version += label_of(version) != label
        source, mode = FolderWeights(self._weights[label]), next(self._modes)
        start_s = time.monotonic()
        self._changes.append((start_s, float("inf")))
        self._version = version
        try:
            await self._main.update_weights(source, version=version, in_flight=mode)  # type: ignore[arg-type]
        finally:
            # Executors that were started meanwhile may have older weights for some seconds more.
            self._changes[-1] = (start_s, time.monotonic() + 15)

    async def insist(self, change: Callable[[], Awaitable[Any]], limit_s: float = 240.0) -> None:
        """Make a change, again until it succeeds."""
        end = time.monotonic() + limit_s
        while True:
            try:
                await change()
                return
            except NanoInferenceError:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(1)

    async def load_guest(self) -> None:
        await self._main.load_adapter(GUEST, str(self._folder / "adapter"))

    async def unload_guest(self) -> None:
        await self._main.unload_adapter(GUEST, timeout_s=60)

    async def load_second(self) -> None:
        await self._client.load_model(SECOND)

    async def unload_second(self) -> None:
        await self._client.unload_model(SECOND, timeout_s=60)

    async def alternate(self, every_s: float, *changes: Callable[[], Awaitable[Any]]) -> None:
        """Make changes in turn until cancelled; one that fails is tried again."""
        for change in itertools.cycle(changes):
            while True:
                await asyncio.sleep(every_s)
                try:
                    await change()
                    self.done[change.__name__] += 1
                    break
                except NanoInferenceError as error:
                    self.failed[f"{change.__name__}: {error.code}"] += 1


class Faults:
    """Faults of processes.

    Attributes:
        done: When, of which role, and how.
    """

    def __init__(self, up: int, watch: Watch, rng: random.Random) -> None:
        self._up, self._watch, self._rng = up, watch, rng
        self.done: list[tuple[float, str, str]] = []

    async def run(self, per_minute: float) -> None:
        """Hit processes in turn until cancelled."""
        while True:
            for role, how in self._rng.sample(FAULTS, len(FAULTS)):
                await asyncio.sleep(self._rng.uniform(0.5, 1.5) * 60 / per_minute)
                await self._hit(role, how)

    async def _hit(self, role: str, how: str) -> None:
        pids = [pid for pid in descendants(self._up) if role_of(pid, MAIN) == role]
        if not pids:
            return
        pid = self._rng.choice(pids)
        self.done.append((self._watch.now_s, role, how))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, SIGNALS[how])
            if how == "stopped":
                try:
                    await asyncio.sleep(self._rng.uniform(2, 6))
                finally:
                    os.kill(pid, signal.SIGCONT)


class Load:
    """Requests until `stop`, so many at a time and a second."""

    def __init__(
        self,
        interfaces: Interfaces,
        judge: Judge,
        changes: Changes,
        known: Sequence[Ask],
        size: Any,
    ) -> None:
        self._interfaces, self.judge, self.changes = interfaces, judge, changes
        self._known, self._size = known, size
        self._rng = random.Random(size.seed)
        self._fresh = self._make_fresh()
        self._next_s = time.monotonic()
        self.is_over = False
        self.sent = 0

    def _make_fresh(self) -> Iterator[Ask]:
        for seed in itertools.count(1000):
            yield from make_asks(200, seed, longest=self._size.longest, known=False)

    async def learn(self) -> None:
        """Send the known requests, undisturbed."""
        asks = iter(self._known)

        async def worker() -> None:
            for ask in asks:
                answer = await self._interfaces.send(ask)
                if ask.kind != "leaving":
                    self.judge.learn(ask, answer)

        await asyncio.gather(*(worker() for _ in range(self._size.concurrency)))

    async def run(self) -> None:
        await asyncio.gather(*(self._worker() for _ in range(self._size.concurrency)))

    async def _worker(self) -> None:
        while not self.is_over:
            wait_s = self._next_s - time.monotonic()
            self._next_s = max(self._next_s, time.monotonic() - 1) + 1 / self._size.rate
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            fresh = self._rng.random() < 0.4
            await self._send(next(self._fresh) if fresh else self._rng.choice(self._known))

    async def _send(self, ask: Ask) -> None:
        self.sent += 1
        # One of a hundred has a tenant that comes once.
        once = self._rng.random() < 0.01
        tenant = f"t{self.sent if once else self._rng.randrange(MOST_TENANTS)}"
        start_s = time.monotonic()
        answer = await self._interfaces.send(ask, tenant)
        crossed = self.changes.crossed(start_s, time.monotonic())
        self.judge.take(ask, answer, crossed=crossed)


# --- at the end --------------------------------------------------------------------------------


async def bills(main: BusClient, ledger: Ledger) -> dict[str, Any]:
    """Compare the bills of an idle deployment with its busy time."""
    await asyncio.sleep(3)  # a report comes every second
    reports = await main.deployment.reports()
    mine = [each for each in ledger.lives if each.model != SECOND]
    return {
        "wrong": time_checks.wrong_bills(reports, mine),
        "unbilled_share": round(time_checks.unbilled_share(reports), 4),
    }


async def replays(client: BusClient, changes: Changes, kept: Sequence[Completion]) -> Any:
    """Replay requests, at the weights that made them; return how many are equal, and why not."""
    reasons: Counter[str] = Counter()
    examples: list[str] = []
    places = asyncio.Semaphore(8)

    async def one(recorded: Completion) -> bool:
        async with places:
            try:
                found = await client.replay(recorded, at=max(versions_of(recorded)))
            except NanoInferenceError as error:
                reasons[error.code] += 1
                examples.append(f"{recorded.request_id}: {error.code}: {error.message[:200]}")
                return False
        if found.verdict != "equal":
            reasons["; ".join(found.reasons)[:200] or found.summary] += 1
            examples.append(f"{recorded.request_id}: {found.summary}; {recorded.recipe}"[:600])
        return found.verdict == "equal"

    equal = 0
    for label in LABELS:
        await changes.insist(lambda label=label: changes.weights(label))  # type: ignore[misc]
        mine = [
            each for each in kept if {label_of(version) for version in versions_of(each)} == {label}
        ]
        equal += sum(await asyncio.gather(*map(one, mine)))
    return {
        "replayed": len(kept),
        "equal": equal,
        "not_equal": dict(reasons.most_common()),
        "examples": examples[:20],
    }


# --- the run ------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def task(work: Awaitable[Any]) -> AsyncIterator[Any]:
    """Run work beside the block; an error of it is raised at the end."""
    running = asyncio.ensure_future(work)
    try:
        yield running
    finally:
        running.cancel()
        (error,) = await asyncio.gather(running, return_exceptions=True)
        if isinstance(error, Exception):
            raise error


async def until_loaded(client: BusClient, up: Any) -> None:
    """Wait until all executors of the main model are ready."""
    end = time.monotonic() + START_S
    while True:
        ready = {
            report.stage
            for report in await client.deployment.reports()
            if report.model == MAIN and report.state == "ready"
        }
        if ready.issuperset(STAGES):
            return
        if up.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"{MAIN} is not ready; only {ready}")
        await asyncio.sleep(0.5)


async def until_idle(client: BusClient, limit_s: float = 300.0) -> int:
    """Wait until no request is on the bus; return the number that still is."""
    end = time.monotonic() + limit_s
    while True:
        left = 0
        for model in (MAIN, SECOND):
            async with client.of_model(model) as of_model:
                backlog = await of_model.bus.requests.backlog()
            left += backlog.waiting + backlog.pending
        if not left or time.monotonic() > end:
            return left
        await asyncio.sleep(1)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


async def soak(folder: Path, size: Any, result: dict[str, Any]) -> None:
    """Run it all; add to the result file's content, also if something fails."""
    rng = random.Random(size.seed)
    server = RedisServer(folder / "data", fsync="everysec")
    await asyncio.to_thread(mixed_requests.write_adapter, folder / "adapter")
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = str(temporary)
    (folder / "deployment.yaml").write_text(yaml.safe_dump(settings(server.url, folder)))
    port, grpc = free_port(), free_port()
    command = ["up", "--config", str(folder / "deployment.yaml"), "--gateway", str(port)]
    async with AsyncExitStack() as stack:
        await server.start()
        stack.callback(server.kill)
        up = start_command([*command, "--grpc-port", str(grpc)], folder / "up.log")
        stack.callback(stop, up)
        url = f"http://127.0.0.1:{port}"
        await asyncio.to_thread(wait_until_answered, f"{url}/readyz", up, limit_s=START_S)
        config = BusConfig(url=server.url, prefix=PREFIX)
        client = await stack.enter_async_context(BusClient.connect(config))
        # The gateway is ready before, since requests may wait.
        await until_loaded(client, up)
        main = await stack.enter_async_context(client.of_model(MAIN))
        link: Any = redis.asyncio.Redis.from_url(server.url, decode_responses=True, protocol=3)
        stack.push_async_callback(link.aclose)
        interfaces = Interfaces(client, link, PREFIX, [url], [f"127.0.0.1:{grpc}"], MAIN)
        await stack.enter_async_context(interfaces)
        ledger, judge = Ledger(size.replays, rng), Judge()
        changes = Changes(client, main, folder)
        watch = Watch(up.pid, server.process.pid, link, temporary, MAIN)
        faults = Faults(up.pid, watch, rng)
        load = Load(
            interfaces, judge, changes, make_asks(size.known, 1, longest=size.longest), size
        )
        try:
            async with task(ledger.read(client)):
                await changes.insist(changes.load_guest)
                await changes.insist(changes.load_second)
                for label in LABELS:
                    await changes.insist(lambda label=label: changes.weights(label))  # type: ignore[misc]
                    await load.learn()
                say(f"undisturbed answers are known; {judge.remarks}")
                watch.begin()
                async with task(watch.run(size.every)):
                    await _run(load, changes, faults, watch, size)
                for change in (changes.load_guest, changes.load_second):
                    await changes.insist(change)
                result["left_on_the_bus"] = await until_idle(client)
                say("idle; bills and replays")
                result["bills"] = await bills(main, ledger)
                result |= ledger.result()
                result["replays"] = await replays(client, changes, [*ledger.kept])
        finally:
            result |= ledger.result() if "ended" not in result else {}
            result["requests"], result["up_survived"] = load.sent, up.poll() is None
            result |= {name: dict(count.most_common()) for name, count in judge.counts.items()}
            result |= {"changes": dict(changes.done), "failed_changes": dict(changes.failed)}
            result["faults"] = Counter(f"{role} {how}" for _, role, how in faults.done)
            result["fault_times_s"] = [round(at_s) for at_s, _, _ in faults.done]
            result["remarks"] = judge.remarks
            result["warm_s"] = size.warm or min(300.0, 3600 * size.hours / 10)
            result["trends"] = trends(watch, result["warm_s"])
            result["errors_logged"] = errors_logged(folder / "up.log")
            result["series"] = thinned(watch)
            raw = [(*name, samples) for name, samples in watch.series.items()]
            write(folder / "series.json", raw)


async def _run(load: Load, changes: Changes, faults: Faults, watch: Watch, size: Any) -> None:
    """Load, changes and faults until the time is over."""
    seconds = 3600 * size.hours
    async with AsyncExitStack() as stack:
        running = asyncio.ensure_future(load.run())
        for every_s, *kinds in (
            (size.change * 1.0, changes.weights),
            (size.change * 0.7, changes.unload_guest, changes.load_guest),
            (size.change * 2.5, changes.unload_second, changes.load_second),
        ):
            await stack.enter_async_context(task(changes.alternate(every_s, *kinds)))
        async with task(faults.run(size.faults)) if size.faults else contextlib.nullcontext():
            await _tell(load, faults, watch, seconds / 2)
        say("no more faults")
        await _tell(load, faults, watch, seconds)
    load.is_over = True
    await running


async def _tell(load: Load, faults: Faults, watch: Watch, until_s: float) -> None:
    while watch.now_s < until_s:
        await asyncio.sleep(min(60.0, max(0.1, until_s - watch.now_s)))
        whole = watch.series[PSS, "all"][-1].value
        wrong = dict(load.judge.counts["wrong"])
        say(
            f"{watch.now_s:6.0f} s: {load.sent} requests, wrong {wrong}, {len(faults.done)} "
            f"faults, changes {dict(load.changes.done)}, failed {dict(load.changes.failed)}, "
            f"{whole:.0f} MiB"
        )


def errors_logged(log: Path) -> dict[str, int]:
    """Return the events of the log with level "error", and lines of tracebacks."""
    found: Counter[str] = Counter()
    for line in log.read_text(errors="replace").splitlines():
        start = line.find("{")
        with contextlib.suppress(ValueError):
            record = json.loads(line[start:]) if start >= 0 else {}
            if record.get("level") in ("error", "critical"):
                found[record.get("event", "")] += 1
        if "Traceback" in line and start < 0:
            found["Traceback"] += 1
    return dict(found.most_common())


def thinned(watch: Watch, points: int = 240) -> dict[str, list[tuple[float, float]]]:
    """Return each series as medians of equal times; of a role the largest process."""
    found = {}
    step_s = max(1.0, watch.now_s / points)
    for (quantity, name), samples in watch.series.items():
        cells: dict[int, list[float]] = {}
        for each in samples:
            cells.setdefault(int(each.at_s / step_s), []).append(each.value)
        found[f"{quantity}: {name}"] = [
            (round((cell + 0.5) * step_s), round(statistics.median(values), 2))
            for cell, values in sorted(cells.items())
        ]
    return found


WRONG = ("lost", "doubled", "gaps", "different")


def wrong_at_all(result: dict[str, Any]) -> list[str]:
    """Return what is wrong."""
    found = [f"{name}: {result['wrong'][name]}" for name in WRONG if result["wrong"].get(name)]
    bus = ("two_ends", "different_on_the_bus", "left_on_the_bus")
    found += [f"{name}: {result[name]}" for name in bus if result[name]]
    found += [f"times: {each}" for each in result["times"]["wrong"][:20]]
    found += [f"bills: {each}" for each in result["bills"]["wrong"]]
    replayed = result["replays"]
    if replayed["equal"] != replayed["replayed"]:
        found.append(f"replays: {replayed['not_equal']}")
    if not result["up_survived"]:
        found.append("up has ended")
    grows = [name for name, each in result["trends"].items() if each["verdict"] == "grows"]
    return [*found, *(f"grows: {name}" for name in grows)]


async def run_program(folder: Path, given: Any) -> dict[str, Any]:
    if given.plot:
        import soak_plot  # now, since the hours would be lost without the extra
    given.hours = given.minutes / 60 or given.hours
    result: dict[str, Any] = {"seconds": 3600 * given.hours, "rate": given.rate}
    try:
        await soak(folder, given, result)
    except Exception:
        result["failed"] = traceback.format_exc()
        result.pop("series", None)
        write(given.json, result)
        raise
    drawn = {name: result.pop(name) for name in ("series", "fault_times_s")}
    write(folder / "drawn.json", drawn)
    if given.plot:
        soak_plot.draw(drawn, given.plot)
    result["wrong_at_all"] = wrong_at_all(result)
    return result | {"clean": not result["wrong_at_all"]}


def show(result: dict[str, Any]) -> None:
    columns = {name: f"{{{name}}}" for name in ("level", "per_hour", "low", "high", "verdict")}
    print_table(columns, result["trends"], "series")
    for name in ("requests", "interface", "kind", "wrong", "other", "refused", "statuses", "times"):
        print(f"{name:20}{result[name]}")
    for name in ("bills", "replays", "changes", "failed_changes", "faults", "errors_logged"):
        print(f"{name:20}{result[name]}")
    for remark in (*result["remarks"], *result["wrong_at_all"]):
        print(f"  {remark}")


def main() -> int:
    return chaos_rig.run_program(
        __doc__,
        run_program,
        show,
        hours=1.0,
        minutes=(0.0, "instead of hours"),
        rate=(8.0, "most requests a second"),
        concurrency=12,
        faults=(1.0, "a minute, in the first half"),
        change=(60.0, "seconds between changes of weights"),
        every=(5.0, "seconds between samples of memory and so on"),
        warm=(0.0, "seconds that don't count for trends; default: a tenth, at most 300"),
        seed=1,
        known=(200, "requests that are answered undisturbed before"),
        longest=(60, "most tokens of a sample"),
        replays=(1000, "requests that are replayed at the end"),
        plot=(Path, "a PNG file"),
    )


if __name__ == "__main__":
    sys.exit(main())
