"""Who closes his connection has his KV blocks freed within one step, whatever he has called.

Counted in steps: the executor does them one by one as the test lets it, and what is planned is
written down, so that nothing here depends on how fast anything is.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest
import pytest_asyncio

from nano_inference.bus.control import Cancel
from nano_inference.bus.messages import AdmittedRequest, StepPlan, StepResult, StepSummary
from nano_inference.gateway.gateway import Gateway
from nano_inference.gateway.server.connections import Connection
from nano_inference.kserve.grpc_codec import encode_infer_request
from nano_inference.kserve.protobuf import METHODS
from nano_inference.kserve.tensors import InferRequest, NamedTensor
from nano_inference.pipeline.pipeline import Pipeline
from nano_inference.stages.batching.core import BatchingCore
from nano_inference.stages.batching.sequence import Sequence
from nano_inference.stages.executor.core import ExecutorCore

from .conftest import LIMIT_S

COMPANION = "companion"
STORY = "Story about David, a dog and a yellow hat:"
MESSAGES = [{"role": "user", "content": STORY}]
TOLD = [{"role": "user", "content": "Write a story about Maria, a mouse and a purple boat."}]
LONG: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
OTHER_NAME = {"temperature": 0, "ignore_eos": True}
CALLS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [STORY, "98 + 25 ="], "n": 2} | LONG,
    "/v1/chat/completions": {"messages": MESSAGES} | LONG,
    "/v1/responses": {"input": STORY, "max_output_tokens": 60} | OTHER_NAME,
    # Which goes on for long by itself.
    "/v1/messages": {"messages": TOLD, "temperature": 0, "max_tokens": 60},
    "/inference/v1/generate": {"token_ids": [5, 6, 7], "sampling_params": LONG},
    "/generate": {"text": STORY, "sampling_params": {"n": 2, "max_new_tokens": 60} | OTHER_NAME},
}

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():  # noqa: ASYNC110  (the condition has no event)
            await asyncio.sleep(0.001)


class Steps:
    """Lets the executor do single steps, and records the plans.

    Attributes:
        planned: The sequences that each plan names, but for the companion's.
        held: Blocks that these have when the result of a step is back.
        learned: The newest plan when the gateway learned that a connection was closed.
        cancelled: Requests that batching was told to end.
    """

    def __init__(self) -> None:
        self._may_run = threading.Semaphore(0)
        self._free = threading.Event()
        self._free.set()
        self._core: BatchingCore
        self.begin()

    def begin(self) -> None:
        """Nothing was written down."""
        self._own: dict[int, Sequence] = {}
        self.planned: dict[int, set[int]] = {}
        self.held: dict[int, int] = {}
        self.learned: int | None = None
        self.cancelled: set[str] = set()

    def hold(self) -> None:
        """From now on the executor does a step for each `let_one`."""
        self._free.clear()

    def let_all(self) -> None:
        self._free.set()
        self._may_run.release()

    async def let_one(self) -> None:
        """Waits until the next step is done, and its result is back."""
        done = len(self.held)
        self._may_run.release()
        await until(lambda: len(self.held) > done)

    @property
    def has_own(self) -> bool:
        """Whether a request other than the companion has arrived."""
        return bool(self._own)

    @property
    def newest(self) -> int:
        """The last plan."""
        return max(self.planned)

    @property
    def last_with_own(self) -> int:
        """The last plan that names a sequence, but for the companion's."""
        return max(step for step, own in self.planned.items() if own)

    @property
    def all_free(self) -> bool:
        """Whether all blocks are."""
        load = self._core.load()
        return load["kv_free"] == load["kv_total"] and self._core.idle

    # --- what the stages do -----------------------------------------------------------------------

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        execute, lost = ExecutorCore.execute, Connection.connection_lost
        plan, absorb = BatchingCore.plan, BatchingCore.absorb
        add, cancel = BatchingCore.add, BatchingCore.cancel

        def held_back(core: ExecutorCore, planned: StepPlan) -> StepResult:
            while not self._free.is_set() and not self._may_run.acquire(timeout=0.05):
                pass
            return execute(core, planned)

        def watched_add(core: BatchingCore, dispatch: AdmittedRequest, *given: Any) -> None:
            add(core, dispatch, *given)
            self._core = core
            if dispatch.info.request_id != COMPANION:
                ids = [spec.seq_id for spec in dispatch.sequences]
                self._own |= {seq_id: core._index[seq_id] for seq_id in ids}

        def watched_plan(core: BatchingCore, now_ns: int) -> StepPlan | None:
            found = plan(core, now_ns)
            if found is not None:
                self.planned[found.step_id] = set(found.seq_ids) & self._own.keys()
            return found

        def watched_absorb(core: BatchingCore, result: StepSummary) -> None:
            absorb(core, result)
            self.held[result.step_id] = sum(len(seq.block_ids) for seq in self._own.values())

        def watched_cancel(core: BatchingCore, told: Cancel) -> None:
            cancel(core, told)
            self.cancelled.add(told.request_id)

        def watched_lost(connection: Connection, error: Exception | None) -> None:
            self.learned = self.newest
            lost(connection, error)

        patch.setattr(ExecutorCore, "execute", held_back)
        patch.setattr(BatchingCore, "add", watched_add)
        patch.setattr(BatchingCore, "plan", watched_plan)
        patch.setattr(BatchingCore, "absorb", watched_absorb)
        patch.setattr(BatchingCore, "cancel", watched_cancel)
        patch.setattr(Connection, "connection_lost", watched_lost)


@pytest.fixture(scope="module")
def watched() -> Iterator[Steps]:
    steps = Steps()
    with pytest.MonkeyPatch.context() as patch:
        steps.watch(patch)
        yield steps


@pytest_asyncio.fixture(loop_scope="module")
async def steps(watched: Steps, shared: Pipeline) -> AsyncIterator[Steps]:
    """The steps of a pipeline in which another request runs, and the executor is held."""
    watched.begin()
    asked = {"max_tokens": 64, "ignore_eos": True}
    other = {"prompt": STORY, "request_id": COMPANION, "sampling": asked}
    watched.hold()
    companion = asyncio.create_task(shared.complete(other))
    try:
        yield watched
    finally:
        watched.let_all()
    async with asyncio.timeout(LIMIT_S):
        completion = await companion
    # Other requests go on, and all blocks are free again.
    assert len(completion.samples[0].token_ids) == 64
    await until(lambda: watched.all_free)


async def call(steps: Steps, port: int, path: str, *, stream: bool, key: str = "") -> Any:
    """Makes a call, and has it run for some steps; returns its connection."""
    body = json.dumps(CALLS[path] | {"stream": stream}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Idempotency-Key: {key}\r\n" if key else ""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    # A chat's template takes time, in which the companion must not come to its end.
    await until(lambda: steps.has_own)
    while sum(map(bool, steps.planned.values())) < 5:
        await steps.let_one()
    assert steps.held[max(steps.held)] > 0
    assert not steps.cancelled
    return writer


async def leave(steps: Steps, writer: Any) -> int:
    """Closes the connection; returns the newest plan when the gateway has learned of it."""
    writer.transport.abort()
    await until(lambda: steps.learned is not None)
    assert steps.learned is not None
    return steps.learned


async def assert_freed(steps: Steps, learned: int) -> None:
    # It takes no step to be told.
    await until(lambda: steps.cancelled != set())
    for _ in range(4):
        await steps.let_one()
    assert steps.last_with_own <= learned + 1
    assert {held for step, held in steps.held.items() if step > learned} == {0}
    assert steps.newest > learned + 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", CALLS)
async def test_a_closed_connection_frees_its_blocks_within_a_step(
    shared: Pipeline, steps: Steps, path: str, stream: bool
) -> None:
    async with Gateway(shared.client, shared.config) as gateway:
        writer = await call(steps, gateway.port, path, stream=stream)
        await assert_freed(steps, await leave(steps, writer))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_over_grpc_that_is_cancelled_frees_its_blocks_within_a_step(
    shared: Pipeline, steps: Steps, stream: bool
) -> None:
    own = msgspec.structs.replace(shared.config.gateway, grpc_port=0)
    config = msgspec.structs.replace(shared.config, gateway=own)
    inputs = [
        NamedTensor("text_input", np.array([STORY.encode()], dtype=np.object_)),
        NamedTensor("stream", np.array([stream])),
    ]
    sampling = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
    name = shared.config.engine.model_name
    request = InferRequest(model_name=name, inputs=tuple(inputs), parameters=sampling)
    asked = encode_infer_request(request)
    async with (
        Gateway(shared.client, config) as gateway,
        grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel,
    ):
        if stream:
            call: Any = channel.stream_stream(METHODS["ModelStreamInfer"].path)()
            await call.write(asked.SerializeToString())
        else:
            call = channel.unary_unary(METHODS["ModelInfer"].path)(asked.SerializeToString())
        while sum(map(bool, steps.planned.values())) < 5:
            await steps.let_one()
        assert not steps.cancelled
        call.cancel()
        async with asyncio.timeout(LIMIT_S):
            await gateway._server.calls.idle()
        await assert_freed(steps, steps.newest)


@pytest.mark.parametrize("stream", [True, False])
async def test_without_a_grace_a_key_changes_nothing(
    shared: Pipeline, steps: Steps, stream: bool
) -> None:
    own = msgspec.structs.replace(shared.config.gateway, resume_grace_s=0)
    config = msgspec.structs.replace(shared.config, gateway=own)
    async with Gateway(shared.client, config) as gateway:
        key = f"none-{stream}"
        writer = await call(steps, gateway.port, "/v1/completions", stream=stream, key=key)
        await assert_freed(steps, await leave(steps, writer))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_keyed_call_goes_on_for_the_grace(
    shared: Pipeline, steps: Steps, stream: bool
) -> None:
    async with Gateway(shared.client, shared.config) as gateway:
        key = f"some-{stream}"
        writer = await call(steps, gateway.port, "/v1/completions", stream=stream, key=key)
        learned = await leave(steps, writer)
        for _ in range(6):
            await steps.let_one()
        assert steps.last_with_own > learned + 3
        assert not steps.cancelled
