"""KServe V2 in front of several lanes: one that dies is not noticed; errors keep their meaning."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import msgspec
import numpy as np
import pytest

from nano_inference import BusClient, Config, Gateway, Pipeline
from nano_inference.config import STAGES
from nano_inference.kserve import KServeClient, KServeError, NamedTensor, text_tensor

from ..commands import Command
from . import reference
from .builders import MORE_TOKENS, stream_request, until
from .conftest import LIMIT_S, MakeConfig, config_maker
from .test_lanes import LaneProcess, lane_config, lane_process  # noqa: F401  (a fixture)

pytestmark = pytest.mark.slow

STREAMED, AT_ONCE = range(5), range(5, 8)


def prompt(index: int) -> list[int]:
    return list(reference.tokenizer().encode(stream_request(index)["prompt"]))


def asked(index: int, *, stream: bool) -> list[NamedTensor]:
    """The tensors of a greedy request, by token ids."""
    sampling = {"temperature": 0, "max_tokens": MORE_TOKENS, "ignore_eos": True}
    return [
        NamedTensor("input_ids", np.array(prompt(index), np.int64)),
        NamedTensor("stream", np.array([stream])),
        text_tensor("sampling_parameters", json.dumps(sampling)),
    ]


@asynccontextmanager
async def called(config: Config) -> AsyncIterator[KServeClient]:
    """A client of a gateway that has no stage in its process."""
    listening = msgspec.structs.replace(config.gateway, grpc_port=0)
    config = msgspec.structs.replace(config, gateway=listening)
    async with (
        asyncio.timeout(LIMIT_S),
        BusClient.connect(config.bus) as bus,
        Gateway(bus, config) as gateway,
        KServeClient(f"127.0.0.1:{gateway.grpc_port}", retries=0) as client,
    ):
        yield client


class Calls:
    """Some streams, and some calls that answer at once, all of which are under way."""

    def __init__(self, client: KServeClient) -> None:
        self._client = client
        self._tokens: dict[int, list[int]] = {index: [] for index in (*STREAMED, *AT_ONCE)}

    async def begin(self) -> None:
        """Waits until a stream is in its middle."""
        self._running = [asyncio.create_task(self._stream(index)) for index in STREAMED]
        self._running += [asyncio.create_task(self._infer(index)) for index in AT_ONCE]
        await until(lambda: any(0 < len(self._tokens[index]) < MORE_TOKENS for index in STREAMED))

    async def finish(self) -> None:
        """To be called behind what is to be survived: each has every token once, those of an
        undisturbed run."""
        assert not all(task.done() for task in self._running)
        await asyncio.gather(*self._running)
        for index, tokens in self._tokens.items():
            wanted = reference.generate(prompt(index), MORE_TOKENS, ignore_eos=True, claimed=tokens)
            assert tokens == wanted, index

    async def _stream(self, index: int) -> None:
        async for answer in self._client.stream("tiny.tokens", asked(index, stream=True)):
            self._tokens[index] += answer.output("output_ids").ravel().tolist()

    async def _infer(self, index: int) -> None:
        answer = await self._client.infer("tiny.tokens", asked(index, stream=False))
        self._tokens[index] += answer.output("output_ids").ravel().tolist()


async def test_a_lane_that_is_killed_is_not_noticed(
    lane_process: LaneProcess,  # noqa: F811
) -> None:
    first, second = lane_process.configs
    async with called(first) as client:
        calls = Calls(client)
        await calls.begin()
        lane_process.kill()
        async with Pipeline(second):
            await calls.finish()


@pytest.fixture
def redis_config(request: pytest.FixtureRequest, redis_url: str) -> MakeConfig:
    request.param = "redis-links"
    return config_maker(request)


class ExecutorProcess(Command):
    """An executor alone in a process."""

    def __init__(self, config: Config, log: Path) -> None:
        settings = {
            "bus.prefix": config.bus.prefix,
            "bus.lane": config.bus.lane,
            "bus.links": config.bus.links,
            "engine.dtype": config.engine.dtype,
        }
        given = [word for pair in settings.items() for word in ("--set", "=".join(pair))]
        super().__init__("run", "--bus", config.bus.url, "--stages", "executor", *given, log=log)


async def test_an_executor_that_is_killed_is_not_noticed(
    redis_config: MakeConfig, tmp_path: Path
) -> None:
    """Another one takes its place in the lane."""
    others = [stage for stage in STAGES if stage != "executor"]
    lane = lane_config(redis_config, "a", pipeline__stages=others)
    log = tmp_path / "log"
    with ExecutorProcess(lane, log) as before:
        async with Pipeline(lane), called(lane) as client:
            calls = Calls(client)
            await calls.begin()
            before.kill()
            with ExecutorProcess(lane, log):
                await calls.finish()


async def test_an_expired_call_without_a_lane_is_refused(redis_config: MakeConfig) -> None:
    """Nobody is there, and still it is not UNAVAILABLE that is told."""
    async with called(lane_config(redis_config, "a")) as client:
        cases: Sequence[tuple[str, list[NamedTensor], str, grpc.StatusCode]] = [
            ("tiny.tokens", asked(0, stream=False), "expired", grpc.StatusCode.DEADLINE_EXCEEDED),
            ("tiny.tokens", [], "invalid_tensor", grpc.StatusCode.INVALID_ARGUMENT),
            ("nobody", asked(0, stream=False), "model_not_found", grpc.StatusCode.NOT_FOUND),
        ]
        for model, inputs, code, status in cases:
            for ask in (once, streamed):
                with pytest.raises(KServeError) as caught:
                    await ask(client, model, inputs)
                assert (caught.value.code, caught.value.status) == (code, status)


async def once(client: KServeClient, model: str, inputs: list[NamedTensor]) -> None:
    await client.infer(model, inputs, budget_ns=2 * 10**8)


async def streamed(client: KServeClient, model: str, inputs: list[NamedTensor]) -> None:
    async for _ in client.stream(model, inputs, budget_ns=2 * 10**8):
        pass
