"""A weight operation that waits for others holds up nobody, and ends when it is told to."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import httpx
import pytest
import torch

from nano_inference.bus.control import (
    JoinWeightsGroup,
    LeaveWeightsGroup,
    ReleaseMemory,
    TellWeightVersion,
    UpdateWeights,
)
from nano_inference.bus.weights import FolderWeights, GroupWeights, TensorMeta, WeightsSource
from nano_inference.config import WeightsError
from nano_inference.gateway.api.sglang import weights as weights_module
from nano_inference.gateway.serving import weight_sync as sync_module
from nano_inference.gateway.serving.weight_sync import VersionLabels, WeightSync
from nano_inference.stages.executor.runner.weights.transports import (
    SharedWeights,
    WeightsGroup,
    group,
)

from ..errors import raises
from ..gateway.fake import FakeEngine
from ..pipeline.builders import until
from ..stages.executor.runner.weights.transports.peers import free_address
from .executor import LIMIT_S, NORM, Executor, running

NEVER_S = 3600.0
"""Longer than any test waits."""


@pytest.fixture
async def executor() -> AsyncIterator[Executor]:
    async with asyncio.timeout(2 * LIMIT_S), running() as found:
        yield found


@pytest.fixture
def mute() -> Iterator[str]:
    """The address of somebody who listens and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def join(name: str, address: str) -> JoinWeightsGroup:
    return JoinWeightsGroup(name, address, 1, 2, "gloo", NEVER_S)


def group_update(**changed: Any) -> UpdateWeights:
    return UpdateWeights(GroupWeights("g", (NORM,)), timeout_s=NEVER_S, **changed)


async def others_are_served(executor: Executor) -> None:
    """Check that messages unrelated to the waiting operation are answered."""
    assert (await executor.ask(TellWeightVersion())).code == ""
    assert (await executor.ask(ReleaseMemory(("gpu",)))).code == "weights_refused"
    assert (await executor.ask(LeaveWeightsGroup("another"))).code == ""
    failed = await executor.ask(join("another", free_address().replace("127", "h" * 70)))
    assert failed.code == "weights_refused"


async def ends(executor: Executor, waiting: list[str]) -> None:
    codes = {(await executor.answer(name)).code for name in waiting}
    assert codes == {"weights_interrupted"}


async def test_a_join_without_a_trainer_blocks_nothing(executor: Executor, mute: str) -> None:
    dead = await executor.tell(join("dead", free_address()))
    silent = await executor.tell(join("mute", mute))
    await others_are_served(executor)
    with SharedWeights({NORM.name: torch.ones(128)}) as shared:
        outcome = await executor.ask(UpdateWeights(shared.source, partial=True))
        assert (outcome.code, outcome.weight_version) == ("", 1)
    with WeightsGroup("127.0.0.1:0", 2, name="g", timeout_s=LIMIT_S) as trainer:
        assert (await executor.ask(join("g", trainer.address))).code == ""
        sending = trainer.broadcast({NORM.name: torch.ones(128)})
        outcome = await executor.ask(UpdateWeights(sending.source, partial=True))
        assert (outcome.code, outcome.weight_version) == ("", 2)
        await asyncio.to_thread(sending.result)
    for name in ("dead", "mute"):
        assert (await executor.ask(LeaveWeightsGroup(name))).code == ""
    await ends(executor, [dead, silent])


async def test_as_many_joins_as_there_are_threads_for(executor: Executor) -> None:
    address = free_address()
    waiting = [
        await executor.tell(join(str(number), address)) for number in range(group._MOST_JOINS)
    ]
    assert (await executor.ask(join("more", address))).code == "weights_busy"
    await others_are_served(executor)
    for number in range(group._MOST_JOINS):
        await executor.tell(LeaveWeightsGroup(str(number)))
    await ends(executor, waiting)
    await until(lambda: not executor.updates._weights.groups._joins)


async def test_the_end_of_the_stage_ends_joins(mute: str) -> None:
    async with asyncio.timeout(2 * LIMIT_S), running() as executor:
        waiting = [
            await executor.tell(join("dead", free_address())),
            await executor.tell(join("mute", mute)),
        ]
        await others_are_served(executor)
    await ends(executor, waiting)


async def test_a_trainer_that_is_silent_holds_up_nothing(executor: Executor) -> None:
    with WeightsGroup("127.0.0.1:0", 2, name="g", timeout_s=LIMIT_S) as trainer:
        assert (await executor.ask(join("g", trainer.address))).code == ""
        waiting = await executor.tell(group_update(partial=True))
        await until(lambda: executor.updates.core.fetching)
        await others_are_served(executor)
        for busy in (
            UpdateWeights(FolderWeights("/nowhere"), timeout_s=NEVER_S),
            UpdateWeights(FolderWeights("/nowhere"), timeout_s=NEVER_S, prepare_as="p"),
            UpdateWeights(FolderWeights("/nowhere"), timeout_s=0.01, part_of="p"),
        ):
            assert (await executor.ask(busy)).code == "weights_busy"
        assert await executor.is_as_it_was_but_for([waiting])
        assert (await executor.ask(LeaveWeightsGroup("g"))).code == ""
        await ends(executor, [waiting])
    assert await executor.is_as_it_was()


# --- the gateway --------------------------------------------------------------------------------


class Waiting(FakeEngine):
    """An engine whose executors wait for a silent trainer until they are released."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.let_go = anyio.Event(), anyio.Event()

    async def stage_weights(
        self, update: str, weights: WeightsSource, *, part: int, timeout_s: float
    ) -> None:
        self.begun.set()
        await self.let_go.wait()
        await super().stage_weights(update, weights, part=part, timeout_s=timeout_s)


@pytest.fixture
def engine() -> Waiting:
    return Waiting()


async def test_calls_wait_for_each_other_only_so_long(
    engine: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_module, "_MORE_S", 0.0)
    sync = WeightSync(engine, VersionLabels(), 0.01)
    await sync.pause("keep")
    part = FolderWeights("a")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sync.take, part, None)
        await engine.begun.wait()
        for call in (
            lambda: sync.pause("abort"),
            sync.resume,
            sync.open,
            sync.close,
            lambda: sync.release_memory(("weights",)),
            lambda: sync.resume_memory(("weights",)),
            lambda: sync.take(part, None),
            lambda: sync.rename("x"),
        ):
            with raises("weights_busy", kind=WeightsError):
                await call()
        engine.let_go.set()
    # The part that was on its way is there, and nothing of what was refused has happened.
    assert engine.names == ["pause", "stage_weights"]
    assert await sync.resume() == 1


async def test_reads_do_not_wait(engine: Waiting, http: httpx.AsyncClient) -> None:
    await http.post("/pause_generation", json={"mode": "in_place"})
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(http.post("/update_weights_from_disk", json={"model_path": "m"}))
        async with asyncio.timeout(LIMIT_S):
            await engine.begun.wait()
        for path in ("/health", "/health_generate", "/get_weight_version", "/model_info"):
            assert (await http.get(path)).status_code == 200, path
        for path in ("/destroy_weights_update_group", "/init_weights_update_group"):
            await http.post(path, json={})
        assert not engine.let_go.is_set()
        engine.let_go.set()


async def test_a_long_list_of_tensors_is_made_beside_the_event_loop(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()

    def meta(*fields: Any) -> TensorMeta:
        threads.add(threading.get_ident())
        return TensorMeta(*fields)

    monkeypatch.setattr(weights_module, "TensorMeta", meta)
    body = {"names": ["x"] * 9, "dtypes": ["float32"] * 9, "shapes": [[1]] * 9}
    answer = await http.post("/update_weights_from_distributed", json=body)
    assert answer.json()["success"]
    assert threads
    assert threading.get_ident() not in threads
