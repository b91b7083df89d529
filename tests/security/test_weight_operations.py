"""Whatever a weight operation says, its sender gets one answer, and the stage goes on as it was."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import torch

from nano_inference.bus.control import (
    FinishUpdate,
    JoinWeightsGroup,
    LeaveWeightsGroup,
    ReleaseMemory,
    TellWeightVersion,
    UpdateWeights,
)
from nano_inference.bus.weights import (
    FolderWeights,
    GroupWeights,
    LocalWeights,
    SharedMemoryWeights,
    StagedWeights,
    TensorMeta,
)
from nano_inference.stages.executor import WeightSyncManager
from nano_inference.stages.executor.changes.effects import Restore
from nano_inference.stages.executor.runner.weights.transports import SharedWeights
from nano_inference.store.in_place import WeightsInPlace

from ..stages.executor.runner.weights.transports.peers import free_address
from .executor import NORM, Executor, running

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def executor() -> AsyncIterator[Executor]:
    async with running() as found:
        yield found


def join(**changed: Any) -> JoinWeightsGroup:
    wish = JoinWeightsGroup("g", "127.0.0.1:1", 1, 2, "gloo", 0.05)
    return msgspec.structs.replace(wish, **changed)


def group(*tensors: TensorMeta, **changed: Any) -> UpdateWeights:
    source = msgspec.structs.replace(GroupWeights("g", tensors), **changed)
    return UpdateWeights(source, timeout_s=1.0)


def memory(meta: TensorMeta, place: tuple[int, int] = (0, 0), name: str = "x") -> UpdateWeights:
    return UpdateWeights(SharedMemoryWeights((name,), (meta,), (place,)), timeout_s=1.0)


def folder(path: str, **changed: Any) -> UpdateWeights:
    return UpdateWeights(FolderWeights(path), timeout_s=changed.pop("timeout_s", 1.0), **changed)


BAD: list[tuple[Any, str]] = [
    (folder("x" * 5000), "4096 bytes"),
    (folder("/tmp/" + "y" * 300), "can't be read"),
    (folder("a\0b"), "NUL"),
    (folder("a\ud800b"), "is not Unicode"),
    (folder(""), "is empty"),
    (folder("x", version=1 << 64), "version"),
    (folder("x", timeout_s=math.nan), "timeout_s"),
    (folder("x", timeout_s=math.inf), "timeout_s"),
    (folder("x", timeout_s=-1.0), "timeout_s"),
    (folder("x", in_flight="finish"), "'keep' or 'retract' or 'abort'"),
    (folder("x", part_of="p" * 2_000_000), "part_of"),
    (folder("x", prepare_as="p" * 2_000_000), "prepare_as"),
    (FinishUpdate("p" * 2_000_000), "prepared"),
    (FinishUpdate("p", 1 << 64), "version"),
    (UpdateWeights(StagedWeights("p" * 2_000_000, 1)), "update"),
    (UpdateWeights(LocalWeights("p" * 2_000_000)), "key"),
    (join(address="h" * 70 + ".example:80"), "host"),
    (join(address="h." * 200 + "example:80"), "host"),
    (join(address="a\0b:80"), "host"),
    (join(address="\ud800:80"), "host"),
    (join(address="127.0.0.1:" + "9" * 5000), "host:port"),
    (join(address="127.0.0.1:0"), "host:port"),
    (join(world_size=1 << 41), "world_size"),
    (join(rank=1 << 40, world_size=1 << 41), "world_size"),
    (join(world_size=-2, rank=-3), "rank"),
    (join(backend="mpi" * 100_000), "backend"),
    (join(group="g" * 2_000_000), "group"),
    (join(group=""), "group"),
    (join(timeout_s=math.nan), "timeout_s"),
    (join(timeout_s=math.inf), "timeout_s"),
    (join(timeout_s=-math.inf), "timeout_s"),
    (join(timeout_s=1e300), "timeout_s"),
    (LeaveWeightsGroup("g" * 2_000_000), "group"),
    (group(TensorMeta("x", "float4_e2m1fn_x2", (2,))), "group"),
    (group(NORM, group="g" * 2_000_000), "group"),
    (memory(TensorMeta("x", "float4_e2m1fn_x2", (2,))), "unknown dtype"),
    (memory(TensorMeta("x", "__class__", (2,))), "unknown dtype"),
    (memory(TensorMeta("x", "\ud800", (2,))), "unknown dtype"),
    (memory(TensorMeta("x", "float32", (-2,))), "has the impossible shape"),
    (memory(TensorMeta("x", "float32", (1 << 62, 1 << 62))), "has the impossible shape"),
    (memory(TensorMeta("x", "float32", (1 << 40,))), "bytes"),
    (memory(TensorMeta("x", "float32", (0,) * 100_000)), "has the impossible shape"),
    (memory(TensorMeta("x", "float32", (10**4000,))), "has the impossible shape"),
    (memory(NORM, name="../../etc/passwd"), "is no name of shared memory"),
    (memory(NORM, name="a\0b"), "is no name of shared memory"),
    (memory(NORM, name="\ud800"), "is no name of shared memory"),
    (memory(NORM, name="s" * 2_000_000), "is no name of shared memory"),
    (ReleaseMemory(("gpu" * 1_000_000,)), "there is no memory"),
]


@pytest.mark.parametrize(("operation", "said"), BAD, ids=[str(n) for n in range(len(BAD))])
async def test_a_bad_argument_is_refused_by_its_name(
    executor: Executor, operation: Any, said: str
) -> None:
    outcome = await executor.ask(operation)
    assert (outcome.code, said in outcome.message) == ("weights_refused", True), outcome.message
    assert len(outcome.message) <= 2000
    assert await executor.is_as_it_was()


@pytest.mark.parametrize("place", [(-1, 0), (0, -4), (0, 1 << 70), (1 << 70, 0), (0, 3)])
async def test_a_place_that_is_none_is_refused(executor: Executor, place: tuple[int, int]) -> None:
    with SharedWeights({"x": torch.ones(4)}) as shared:
        meta = TensorMeta("x", "float32", (4,))
        outcome = await executor.ask(memory(meta, place, shared.source.segments[0]))
    assert outcome.code == "weights_refused"
    assert await executor.is_as_it_was()


@pytest.mark.parametrize("error", [RuntimeError("s" * 10_000), MemoryError(), RecursionError("x")])
@pytest.mark.parametrize(
    "operation",
    [
        folder("/tmp"),
        folder("/tmp", part_of="p"),
        folder("/tmp", prepare_as="p"),
        group(NORM),
        memory(NORM),
        UpdateWeights(LocalWeights("x")),
        join(),
    ],
)
async def test_unexpected_errors_are_answered(
    executor: Executor, operation: Any, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    package = "nano_inference.stages.executor"
    transports = f"{package}.runner.weights.transports"
    monkeypatch.setattr(f"{transports}.fetch", fail)
    monkeypatch.setattr(f"{transports}.folder.stamp_of", fail)
    monkeypatch.setattr(f"{transports}.group.await_port", fail, raising=False)
    outcome = await executor.ask(operation)
    assert outcome.code == "weights_refused"
    assert type(error).__name__ in outcome.message
    assert len(outcome.message) < 500
    assert executor.lines[-1]["exc_info"] is error
    assert await executor.is_as_it_was()


async def test_an_error_of_the_check_on_the_torch_thread_is_an_answer(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        SharedWeights({"model.norm.weight": torch.ones(128)}) as shared,
        monkeypatch.context() as m,
    ):

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("it does not compare")

        m.setattr(WeightSyncManager, "check_complete", fail)
        for changed in ({}, {"prepare_as": "p"}):
            outcome = await executor.ask(UpdateWeights(shared.source, partial=True, **changed))
            assert (outcome.code, "RuntimeError" in outcome.message) == ("weights_refused", True)
        assert not executor.updates.core.prepared
    assert await executor.is_as_it_was()


@pytest.mark.parametrize("folder", ["a\0b", "x" * 5000, "\ud800", "/dev/zero", "/proc/self/mem"])
async def test_a_record_of_the_lanes_weights_is_checked(
    executor: Executor, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes from the bus, where others may write."""
    core = executor.updates.core
    monkeypatch.setattr(core.succession, "behind", 0)
    record = WeightsInPlace(version=7, leader="x", folder=folder)
    await executor.updates._perform([Restore(record)])
    assert core.succession.behind == 7
    assert executor.lines[-1]["event"] == "weights_behind"
    monkeypatch.undo()
    assert await executor.is_as_it_was()


@pytest.mark.parametrize("version", [0, -1, 1 << 63, 10**30])
async def test_the_lane_has_no_version_outside_the_range(version: int) -> None:
    for decode, encode in (
        (msgspec.json.decode, msgspec.json.encode),
        (msgspec.convert, lambda content: content),
    ):
        with pytest.raises(msgspec.ValidationError):
            decode(encode({"version": version, "leader": "x"}), type=WeightsInPlace)


TEXTS = ["", "g", "x" * 300, "a\0b", "/", "..", "é" * 200, "\u202e", "%s", "model.norm.weight"]
NUMBERS = [0, 1, -1, 2, 1 << 31, 1 << 41, 1 << 63, -(1 << 63), 10**30]
TIMES = [0.01, 0.0, -1.0, 1e300, math.nan, math.inf, -math.inf]
DTYPES = ["float32", "int32", "bool", "float4_e2m1fn_x2", "complex64", "", "nn", "quint8"]


def mutants(seed: int, segment: str) -> Callable[[], Any]:
    """Makes operations none of which can put weights in place."""
    chance = random.Random(seed)
    pick = chance.choice

    def meta() -> TensorMeta:
        # Never all of: a name of the model's, its dtype and its shape.
        shape = tuple(pick(NUMBERS) for _ in range(chance.randrange(4)))
        return TensorMeta(pick(TEXTS), pick(DTYPES), shape)

    def metas() -> tuple[TensorMeta, ...]:
        return tuple(meta() for _ in range(chance.randrange(4)))

    def source() -> Any:
        segments = tuple(pick([segment, *TEXTS]) for _ in range(chance.randrange(3)))
        places = tuple((pick(NUMBERS), pick(NUMBERS)) for _ in range(chance.randrange(4)))
        return pick(
            [
                FolderWeights(pick([*TEXTS, "/dev/zero", "/proc/self/mem", "/root", "x" * 5000])),
                SharedMemoryWeights(segments, metas(), places),
                SharedMemoryWeights((segment,), (meta(),), ((0, 0),)),
                GroupWeights(pick(TEXTS), metas(), pick(NUMBERS), pick([None, *NUMBERS])),
                LocalWeights(pick(TEXTS)),
                StagedWeights(pick(TEXTS), pick(NUMBERS)),
            ]
        )

    def operation() -> Any:
        version = pick([None, *NUMBERS])
        address = pick([free_address(), "", ":", "[::1]:x", "h" * 70 + ":1", "127.0.0.1:99999"])
        return pick(
            [
                *(
                    UpdateWeights(
                        source(),
                        pick(["keep", "retract", "abort"]),
                        version,
                        pick([True, False]),
                        pick(TIMES),
                        **pick([{}, {"part_of": pick(TEXTS)}, {"prepare_as": pick(TEXTS)}]),
                    )
                    for _ in range(4)
                ),
                FinishUpdate(pick(TEXTS), version),
                JoinWeightsGroup(
                    pick(TEXTS),
                    address,
                    pick(NUMBERS),
                    pick(NUMBERS),
                    pick(["gloo", "nccl", *TEXTS]),
                    pick(TIMES),
                ),
                LeaveWeightsGroup(pick(TEXTS)),
                ReleaseMemory((pick(TEXTS),)),
                TellWeightVersion(),
            ]
        )

    return operation


CODES = {
    *("", "weights_refused", "weights_busy", "weights_timeout", "weights_incomplete"),
    "weights_interrupted",
}


@pytest.mark.parametrize("seed", range(4))
async def test_each_of_many_strange_operations_gets_one_answer(
    executor: Executor, seed: int
) -> None:
    with SharedWeights({"x": torch.zeros(64)}) as shared:
        make = mutants(seed, shared.source.segments[0])
        told = [await executor.tell(make()) for _ in range(100)]
        outcomes = [await executor.answer(name) for name in told]
    assert {outcome.weight_version for outcome in outcomes} == {0}
    assert {outcome.code for outcome in outcomes} <= CODES
    assert await executor.is_as_it_was()
