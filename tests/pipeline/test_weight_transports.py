"""Weights from other processes reach a pipeline that runs, or leave it as it was, in time."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from nano_inference import GenerateRequest, Pipeline, SamplingParams, WeightsError
from nano_inference.bus.weights import FolderWeights, GroupWeights, StagedWeights, TensorMeta
from nano_inference.config import load_config
from nano_inference.stages.executor.runner.weights.transports import SharedWeights, WeightsGroup

from .. import oracle
from ..stages.executor.models import make_model
from ..stages.executor.runner.weights.transports.peers import Peer, free_address
from . import reference
from .test_life import until

LIMIT_S = 120.0
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def loaded() -> State:
    return dict(reference.model().state_dict())


@pytest.fixture
async def running() -> AsyncIterator[Pipeline]:
    config = load_config(env={}, overrides={"engine.dtype": "float32"})
    async with asyncio.timeout(2 * LIMIT_S), Pipeline(config) as pipeline:
        yield pipeline


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


async def test_a_folder_and_a_file(running: Pipeline, loaded: State, tmp_path: Path) -> None:
    file = spelt(tmp_path, loaded, 1)
    assert await running.client.update_weights(FolderWeights(str(tmp_path))) == 1
    assert await spells(running) == (1, oracle.token_of(1))
    save_file(oracle.announcing(loaded, 2), file)
    assert await running.client.update_weights(FolderWeights(str(file))) == 2
    assert await spells(running) == (2, oracle.token_of(2))


async def test_shared_memory(running: Pipeline, loaded: State) -> None:
    weights = oracle.announcing(loaded, 1)
    with SharedWeights(weights, bucket_bytes=100_000) as shared:
        assert await running.client.update_weights(shared.source) == 1
        shared.update(oracle.announcing(loaded, 2))
        # What the executor has is its own.
        assert await spells(running) == (1, oracle.token_of(1))
        assert await running.client.update_weights(shared.source) == 2
        assert await spells(running) == (2, oracle.token_of(2))
    with pytest.raises(WeightsError, match="there is no shared memory"):
        await running.client.update_weights(shared.source)
    assert await running.client.weight_version() == 2


@pytest.mark.parametrize("bucket_bytes", [0, 200_000])
async def test_our_own_group(running: Pipeline, loaded: State, bucket_bytes: int) -> None:
    with WeightsGroup("127.0.0.1:0", 2, timeout_s=LIMIT_S) as group:
        await running.client.join_weights_group("weights", group.address, 2)
        for version in (1, 2, 3):
            weights = oracle.announcing(loaded, version)
            sending = group.broadcast({k: v.bfloat16() for k, v in weights.items()}, bucket_bytes)
            assert await running.client.update_weights(sending.source) == version
            await asyncio.to_thread(sending.result)
            assert await spells(running) == (version, oracle.token_of(version))


async def test_experts_that_come_in_several_parts(tmp_path: Path) -> None:
    """A checkpoint has each expert by itself, and the model has those of a layer in one tensor."""
    folders = [tmp_path / "old", tmp_path / "new"]
    for seed, folder in enumerate(folders):
        shutil.copytree(reference.FOLDER, folder)
        make_model("mixtral", seed=seed, vocab_size=4096).save_pretrained(folder)
    config = {"engine.model_path": str(folders[0]), "engine.dtype": "float32"}
    tensors = sorted(load_file(folders[1] / "model.safetensors").items())
    parts = [dict(tensors[start::3]) for start in range(3)]
    assert all(any(".experts." in name for name in part) for part in parts)
    async with (
        asyncio.timeout(LIMIT_S),
        Pipeline(load_config(env={}, overrides=config)) as pipeline,
    ):
        client = pipeline.client
        for count in (2, 3):  # at first one is missing
            for part in parts[:count]:
                with SharedWeights(part) as shared:
                    await client.stage_weights("u", shared.source)
                    if count == 2:
                        with pytest.raises(WeightsError, match="all parts of a parameter"):
                            await client.update_weights(shared.source, partial=True)
            if count == 2:
                with pytest.raises(WeightsError, match="all parts of a parameter"):
                    await client.update_weights(StagedWeights("u", 2), partial=True)
                assert await client.weight_version() == 0
        assert await client.update_weights(StagedWeights("u", 3)) == 1
        (sample,) = (await pipeline.complete(request(8))).samples
    model = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32)
    tokens = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False)
    assert list(sample.token_ids) == tokens[0, 3:].tolist()


async def test_a_killed_trainer_and_the_next_one(
    running: Pipeline, loaded: State, tmp_path: Path
) -> None:
    file = spelt(tmp_path, loaded, 1)
    async with generating(running) as tokens:
        with Peer() as peer:
            await joined(running, peer)
            peer.tell("half", file)
            update = asyncio.create_task(running.client.update_weights(peer.source(file)))
            assert await heard(peer) == "half"
            before = tokens()
            # Generation goes on while half of the weights are there.
            await until(lambda: tokens() > before + 40)
            assert not update.done()
            peer.kill()
            with pytest.raises(WeightsError) as broken:
                await update
            assert broken.value.code == "weights_interrupted"
        assert await running.client.weight_version() == 0
        before = tokens()
        with Peer() as peer:
            await joined(running, peer)
            assert await synced(running, peer, file) == 1
        await until(lambda: tokens() > before)
    assert await spells(running) == (1, oracle.token_of(1))


async def test_a_trainer_that_hangs_and_the_next_one(
    running: Pipeline, loaded: State, tmp_path: Path
) -> None:
    file = spelt(tmp_path, loaded, 1)
    async with generating(running) as tokens:
        with Peer() as peer:
            await joined(running, peer)
            peer.hang()
            before, started = tokens(), time.monotonic()
            with pytest.raises(WeightsError) as late:
                await running.client.update_weights(peer.source(file), timeout_s=1.5)
            assert late.value.code == "weights_timeout"
            assert time.monotonic() - started < LIMIT_S / 2
            assert tokens() > before
            assert await running.client.weight_version() == 0
            with Peer() as second:
                await joined(running, second)
                assert await synced(running, second, file) == 1
    assert await spells(running) == (1, oracle.token_of(1))


async def test_leaving_a_group_ends_an_update_that_hangs(
    running: Pipeline, loaded: State, tmp_path: Path
) -> None:
    file = spelt(tmp_path, loaded, 1)
    with Peer() as peer:
        await joined(running, peer)
        update = asyncio.create_task(running.client.update_weights(peer.source(file)))
        peer.tell("half", file)
        assert await heard(peer) == "half"
        await running.client.leave_weights_group("weights")
        with pytest.raises(WeightsError) as left:
            await update
        assert left.value.code == "weights_interrupted"


async def test_weights_that_were_refused_are_not_taken_for_the_next(
    running: Pipeline, loaded: State
) -> None:
    """The executor is out of step with a broadcast that it was too busy for, so it leaves."""
    with WeightsGroup("127.0.0.1:0", 2, timeout_s=LIMIT_S) as group:
        await running.client.join_weights_group("weights", group.address, 2)
        first = group.broadcast(oracle.announcing(loaded, 1))
        outcomes = await asyncio.gather(
            *(running.client.update_weights(first.source) for _ in range(2)),
            return_exceptions=True,
        )
        done = [outcome for outcome in outcomes if outcome == 1]
        codes = [error.code for error in outcomes if isinstance(error, WeightsError)]
        assert len(done) + len(codes) == 2
        assert codes
        again = group.broadcast(oracle.announcing(loaded, 2))
        with pytest.raises(WeightsError, match="not in the group"):
            await running.client.update_weights(again.source)
        assert await running.client.weight_version() == len(done)


async def test_a_group_that_is_not_there(running: Pipeline) -> None:
    with pytest.raises(WeightsError) as late:
        await running.client.join_weights_group("x", free_address(), 2, timeout_s=0.5)
    assert late.value.code == "weights_timeout"
    metas = (TensorMeta("model.norm.weight", "float32", (128,)),)
    with pytest.raises(WeightsError, match="not in the group 'x'"):
        await running.client.update_weights(GroupWeights("x", metas))
    await running.client.leave_weights_group("x")  # which it is not in


async def test_a_pipeline_ends_while_a_trainer_hangs(loaded: State, tmp_path: Path) -> None:
    file = spelt(tmp_path, loaded, 1)
    config = load_config(env={}, overrides={"engine.dtype": "float32"})
    with Peer() as peer:
        async with asyncio.timeout(LIMIT_S):
            async with Pipeline(config) as pipeline:
                await joined(pipeline, peer)
                peer.hang()
                update = asyncio.create_task(
                    pipeline.client.update_weights(peer.source(file), timeout_s=10 * LIMIT_S)
                )
                await spells(pipeline)
            with pytest.raises(WeightsError) as lost:
                await update
            assert lost.value.code == "weights_interrupted"
