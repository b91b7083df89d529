"""Weights of a trainer that fails and in parts, and their parity with a model that loads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from safetensors.torch import save_file

from nano_inference import (
    GenerateRequest,
    Pipeline,
    SamplingParams,
    WeightsError,
)

from .. import oracle
from ..stages.executor.runner.weights.transports.peers import Peer
from .builders import State, raises, until
from .conftest import LIMIT_S

# --- transports ------------------------------------------------------------------------------


def spelt(folder: Path, loaded: State, version: int) -> Path:
    file = folder / f"{version}.safetensors"
    save_file(oracle.announcing(loaded, version), file)
    return file


async def spells(pipeline: Pipeline) -> tuple[int, int]:
    """The version that a token is stamped with, and the token."""
    completion = await pipeline.complete(request(1))
    (sample,) = completion.samples
    return sample.weight_version, sample.token_ids[0]


def request(max_tokens: int) -> GenerateRequest:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(prompt_token_ids=(5, 6, 7), sampling=sampling)


@asynccontextmanager
async def generating(pipeline: Pipeline) -> AsyncIterator[Callable[[], int]]:
    """Requests one after the other; gives how many tokens they have had."""
    tokens = 0
    done = asyncio.Event()

    async def generate() -> None:
        nonlocal tokens
        while not done.is_set():
            completion = await pipeline.complete(request(20))
            assert completion.status == "done"
            tokens += len(completion.samples[0].token_ids)

    task = asyncio.create_task(generate())
    try:
        yield lambda: tokens
    finally:
        done.set()
        await task


async def heard(peer: Peer) -> str:
    return await asyncio.to_thread(peer.hear)


async def joined(pipeline: Pipeline, peer: Peer) -> None:
    await pipeline.client.join_weights_group(peer.group, peer.address, 2, timeout_s=LIMIT_S)
    assert await heard(peer) == "joined"


async def synced(pipeline: Pipeline, peer: Peer, file: Path) -> int:
    peer.tell("send", file)
    return await pipeline.client.update_weights(peer.source(file), timeout_s=LIMIT_S)


async def test_another_trainer_follows_a_killed_one(
    exact: Pipeline, loaded: State, tmp_path: Path
) -> None:
    file = spelt(tmp_path, loaded, 1)
    async with generating(exact) as tokens:
        with Peer() as peer:
            await joined(exact, peer)
            peer.tell("half", file)
            update = asyncio.create_task(exact.client.update_weights(peer.source(file)))
            assert await heard(peer) == "half"
            before = tokens()
            # Generation goes on while half of the weights are there.
            await until(lambda: tokens() > before + 40)
            assert not update.done()
            peer.kill()
            with raises("weights_interrupted", kind=WeightsError):
                await update
        assert await exact.client.weight_version() == 0
        before = tokens()
        with Peer() as peer:
            await joined(exact, peer)
            assert await synced(exact, peer, file) == 1
        await until(lambda: tokens() > before)
    assert await spells(exact) == (1, oracle.token_of(1))


# --- parity ----------------------------------------------------------------------------------


GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
