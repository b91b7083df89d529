"""SIGKILL of either side of a handover, in each of its phases: no token and nothing held is lost.

One replica prefills and one decodes, each in a process of its own, so that blocks go through shared
memory; the other stages run here.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from nano_inference import Completion, Config, Pipeline
from nano_inference.bus.public import CompletionChunk, Output
from nano_inference.bus.redis.bus import COMMAND_CONNECTIONS
from nano_inference.stages.fairness.parts.handovers import Handovers

from ..programs import Program
from . import kill_phases
from .builders import until
from .conftest import MakeConfig
from .test_replicas import FRONT, epoch_of, fairness_of, lanes_of
from .test_roles import bits

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("make_config", ["redis-links"], indirect=True),
]

SHORT_MODEL = True
GIVER, TAKER = 0, 1
REQUESTS = 4
MORE_CONNECTIONS = 2 * (COMMAND_CONNECTIONS - 1)
"""To Redis: both pools of a process grow when they need to."""
LIMIT_S = 120

SETTINGS: dict[str, Any] = {
    "pipeline.replicas": 2,
    "pipeline.roles": ["prefill", "decode"],
    "pipeline.restart_backoff_s": 0.01,
    "engine.deterministic": True,
    "engine.kv_audit_every": 1,
    "admission.max_lane_deaths": 1000,
}


EVERY_DAY = [
    ("offered", GIVER),
    ("read and not loaded", TAKER),
]
SOAK = 100


def kills(soak: bool) -> list[tuple[str, int]]:
    """The phase and the side of each kill; "" for any moment."""
    if not soak:
        return EVERY_DAY
    phases = (*kill_phases.PHASES, "")
    # One side after the other, so that the survivor stays the same.
    return [
        (phases[number % len(phases)], side)
        for side in (GIVER, TAKER)
        for number in range(SOAK // 2)
    ]


def kinds_of_descriptors(pid: int | str) -> Counter[str]:
    """The open descriptors of a process."""
    kinds: Counter[str] = Counter()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # it listed the folder
            target = os.readlink(f"/proc/{pid}/fd/{number}")
            kinds["memfd" if "memfd" in target else target.partition(":")[0]] += 1
    known = {kind: kinds[kind] for kind in ("memfd", "socket")}
    return Counter({**known, "other": kinds.total() - sum(known.values())})


class Replica:
    """A replica's process, which is started again by `start`.

    Attributes:
        process: None before the first start.
    """

    def __init__(self, number: int, config: Config, folder: Path) -> None:
        self.number, self._folder = number, folder
        self._state = folder / f"{number}.json"
        settings = {
            **SETTINGS,
            "bus.prefix": config.bus.prefix,
            "bus.links": config.bus.links,
            "engine.model_path": config.engine.model_path,
            "engine.dtype": config.engine.dtype,
            "pipeline.replica": number,
        }
        self._command = ["run", "--bus", config.bus.url, "--stages", "batching,executor"]
        for name, value in settings.items():
            self._command += ["--set", f"{name}={json.dumps(value)}"]
        self.process: Program | None = None
        self._descriptors: dict[int, Counter[str]] = {}

    def start(self) -> None:
        temporary = self._folder / "tmp"
        temporary.mkdir(exist_ok=True)
        self._state.with_suffix(".pid").unlink(missing_ok=True)
        self.process = Program(
            Path(kill_phases.__file__),
            str(self._folder),
            str(self.number),
            *self._command,
            log=self._folder / "log",
            environment={**os.environ, "TMPDIR": str(temporary)},
        )

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    async def died(self) -> None:
        """Wait for the end by SIGKILL."""
        process = self.process
        assert process is not None
        await until(lambda: process.poll() is not None)
        assert process.wait() == -signal.SIGKILL
        process.close()

    async def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self.process.wait, 30)
            self.process.kill()
            self.process.close()

    async def state(self) -> dict[str, int]:
        """As `kill_phases.state_of`; empty while the model is loading."""
        await until(self._state.with_suffix(".pid").exists)  # else the signal would end it
        self._state.unlink(missing_ok=True)
        os.kill(self.pid, signal.SIGUSR1)
        await until(self._state.exists)
        state: dict[str, int] = json.loads(self._state.read_text())
        return state

    def check_descriptors(self) -> None:
        """At most its own slots twice (file and mapping) and those of one other are open, and no
        more of anything else than at the first check, but for connections to Redis."""
        found = kinds_of_descriptors(self.pid)
        first = self._descriptors.setdefault(self.pid, found)
        assert found["memfd"] <= 3
        assert found["socket"] <= first["socket"] + MORE_CONNECTIONS
        assert found["other"] <= first["other"]

    def mappings(self) -> int:
        """Of its own host slots, and of those of others."""
        maps = Path(f"/proc/{self.pid}/maps").read_text()
        return sum("memfd:nano-kv" in line for line in maps.splitlines())


@asynccontextmanager
async def replicas_of(config: Config, folder: Path) -> AsyncIterator[list[Replica]]:
    replicas = [Replica(number, config, folder) for number in (GIVER, TAKER)]
    try:
        for replica in replicas:
            replica.start()
        yield replicas
    finally:
        for replica in replicas:
            await replica.stop()


def bodies(round_: int) -> list[dict[str, Any]]:
    """Requests with prompts of their own: no cache holds their KV."""
    draw = random.Random(round_)
    return [
        {
            "request_id": f"{round_}-{index}",
            "prompt_token_ids": [draw.randrange(40, 120) for _ in range(draw.randrange(40, 120))],
            "n": 1 + index % 2,
            "stream": index % 4 != 3,
            "sampling": {
                "temperature": float(index % 2),
                "seed": index,
                "max_tokens": draw.randrange(5, 14),
                "ignore_eos": True,
                "logprobs": 1,
            },
        }
        for index in range(REQUESTS)
    ]


def check_chunks(outputs: list[Output]) -> None:
    """A stream has each token of its samples once, and one terminal message."""
    *chunks, completion = outputs
    assert isinstance(completion, Completion)
    tokens: dict[int, tuple[int, ...]] = {}
    for chunk in chunks:
        assert isinstance(chunk, CompletionChunk)
        so_far = tokens.get(chunk.sample_index, ())
        assert chunk.token_offset == len(so_far)
        tokens[chunk.sample_index] = so_far + chunk.token_ids
    if tokens:
        assert tokens == {s.sample_index: s.token_ids for s in completion.samples}


def ends_of(config: Config, request_id: str) -> list[bool]:
    """For each entry of a request's stream on Redis, whether it is a terminal message."""
    with redis.from_url(config.bus.url, decode_responses=True) as foreign:
        entries = foreign.xrange(f"{config.bus.prefix}:out:{request_id}")
    return [json.loads(fields["json"])["type"] == "completion" for _, fields in entries]


async def whole_lane(pipeline: Pipeline, replicas: list[Replica]) -> None:
    """Until both replicas take part, and hold nothing."""
    await pipeline.ready()
    for replica in replicas:
        while not await replica.state():  # noqa: ASYNC110  (another process has no event)
            await asyncio.sleep(0.05)
    places = 2 * pipeline.config.engine.batch_size_on("cpu")
    await until(lambda: fairness_of(pipeline).epoch == epoch_of(pipeline))
    await until(lambda: lanes_of(pipeline) == ["batching", "batching.1"])
    await until(lambda: fairness_of(pipeline)._core.credits == places)
    for replica in replicas:
        state = await replica.state()
        while any(state.values()):
            assert not state["different"]
            await asyncio.sleep(0.05)
            state = await replica.state()


async def hit(
    pipeline: Pipeline, replicas: list[Replica], folder: Path, number: int, phase: str, side: int
) -> list[list[Output]]:
    """One kill under load; return the requests' outputs."""
    victim, survivor = replicas[side], replicas[1 - side]
    survivor.check_descriptors()
    if phase:
        kill_phases.lay(folder, phase, victim.pid)

    async def read(body: dict[str, Any]) -> list[Output]:
        return [output async for output in pipeline.submit(body)]

    reads = [asyncio.create_task(read(body)) for body in bodies(number)]
    if not phase:
        await asyncio.sleep(random.Random(number).uniform(0, 0.4))
        os.kill(victim.pid, signal.SIGKILL)
    await victim.died()
    assert not phase or kill_phases.sprung(folder, phase)
    (folder / f"{phase}, sprung").unlink(missing_ok=True)
    victim.start()
    outputs = await asyncio.gather(*reads)
    await whole_lane(pipeline, replicas)
    # The mapping of the dead process's memory is gone with the epoch.
    assert survivor.mappings() <= 2
    survivor.check_descriptors()
    return outputs


@pytest.mark.soak
async def test_a_kill_in_any_phase_costs_no_token_and_leaves_nothing(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soak: bool
) -> None:
    rounds = kills(soak)
    leave = Handovers.left

    def left(self: Handovers, *args: Any) -> None:
        leave(self, *args)
        kill_phases.reach(tmp_path, "reported to fairness")

    monkeypatch.setattr(Handovers, "left", left)
    numbered = [body for number in range(len(rounds)) for body in bodies(number)]
    here = {"bus__url": "memory", "bus__links": "auto"}
    async with Pipeline(make_config(engine__deterministic=True, **here)) as alone:
        done = await asyncio.gather(*map(alone.complete, numbered))
    expected = {each.request_id: bits(each) for each in done}
    overrides = {name.replace(".", "__"): value for name, value in SETTINGS.items()}
    config = make_config(pipeline__stages=FRONT, **overrides)
    shared_memory = {name for name in os.listdir("/dev/shm") if "nano" in name}
    async with Pipeline(config) as pipeline, replicas_of(config, tmp_path) as replicas:
        await whole_lane(pipeline, replicas)
        await asyncio.gather(
            *map(pipeline.complete, bodies(SOAK))
        )  # the taker maps the giver's slots
        before: Counter[str] | None = None
        for number, (phase, side) in enumerate(rounds):
            async with asyncio.timeout(LIMIT_S):
                outputs = await hit(pipeline, replicas, tmp_path, number, phase, side)
            for each in outputs:
                check_chunks(each)
                end = each[-1]
                assert isinstance(end, Completion)
                assert bits(end) == expected[end.request_id], (number, phase, side)
            ours = kinds_of_descriptors("self")
            before = before or ours
            assert ours["socket"] <= before["socket"] + MORE_CONNECTIONS
            assert ours["other"] <= before["other"]
        for name in expected:
            ends = ends_of(config, name)
            assert (ends.count(True), ends[-1]) == (1, True), name
        assert not await pipeline.bus.requests.dead_letters()
    assert not list((tmp_path / "tmp").iterdir()), "a killed process left files"
    assert {name for name in os.listdir("/dev/shm") if "nano" in name} == shared_memory
