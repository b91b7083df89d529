"""Weights of a trainer that fails and in parts, and their parity with a model that loads them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nano_inference import (
    EngineConfig,
    GenerateRequest,
    InferenceEngine,
    Pipeline,
    SamplingParams,
    WeightsError,
)
from nano_inference.bus.weights import StagedWeights
from nano_inference.config import load_config
from nano_inference.stages.executor.runner.weights.transports import SharedWeights
from nano_inference.stages.executor.runner.weights.transports.folder import read_folder

from .. import oracle
from ..soaking import in_soak
from ..stages.executor.models import make_model
from ..stages.executor.runner.weights.transports.peers import Peer
from . import reference
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


async def test_experts_may_come_in_several_parts(tmp_path: Path) -> None:
    """A checkpoint has each expert by itself, and the model has those of a layer in one tensor."""
    folders = [tmp_path / "old", tmp_path / "new"]
    for seed, folder in enumerate(folders):
        shutil.copytree(reference.FOLDER, folder)
        make_model("mixtral", seed=seed, vocab_size=4096).save_pretrained(folder)
    config = {"engine.model_path": str(folders[0]), "engine.dtype": "float32"}
    tensors = sorted(load_file(folders[1] / "model.safetensors").items())
    parts = [dict(tensors[start::3]) for start in range(3)]
    assert all(any(".experts." in name for name in part) for part in parts)
    async with Pipeline(load_config(env={}, overrides=config)) as pipeline:
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


async def test_a_pipeline_ends_while_a_trainer_hangs(loaded: State, tmp_path: Path) -> None:
    file = spelt(tmp_path, loaded, 1)
    config = load_config(env={}, overrides={"engine.dtype": "float32"})
    with Peer() as peer:
        async with Pipeline(config) as pipeline:
            await joined(pipeline, peer)
            peer.hang()
            update = asyncio.create_task(
                pipeline.client.update_weights(peer.source(file), timeout_s=10 * LIMIT_S)
            )
            await spells(pipeline)
        with raises("weights_interrupted", kind=WeightsError):
            await update


# --- parity ----------------------------------------------------------------------------------


GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)

PROMPTS = [[7, 8, 9], list(range(40, 110)), [300] * 17]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool, int], Path]:
    """Models like the bundled one with other weights, embeddings tied or not."""
    root = tmp_path_factory.mktemp("models")

    def make(tied: bool, seed: int) -> Path:
        folder = root / f"{'tied' if tied else 'untied'}-{seed}"
        if folder.exists():
            return folder
        shutil.copytree(reference.FOLDER, folder)
        model: Any = AutoModelForCausalLM.from_pretrained(
            reference.FOLDER, dtype=torch.float32, tie_word_embeddings=tied
        )
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.05 * noise)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        model.bfloat16().save_pretrained(folder)
        return folder

    return make


def config(folder: Path, dtype: str, deterministic: bool, kernels: str) -> EngineConfig:
    return EngineConfig(
        model_path=str(folder), dtype=dtype, deterministic=deterministic, kernels=kernels
    )


@pytest.mark.parametrize(
    ("dtype", "deterministic", "kernels", "tied"),
    [
        ("bfloat16", True, "auto", False),
        ("float32", False, "off", True),
        in_soak("bfloat16", False, "auto", True),
        in_soak("float32", True, "auto", False),
        in_soak("bfloat16", False, "auto", False),
        in_soak("bfloat16", False, "off", True),
        in_soak("bfloat16", False, "off", False),
        in_soak("bfloat16", True, "auto", True),
        in_soak("float32", True, "auto", True),
        in_soak("float32", False, "auto", True),
        in_soak("float32", False, "auto", False),
        in_soak("float32", False, "off", False),
    ],
)
def test_updated_weights_equal_loaded_weights(
    folders: Callable[[bool, int], Path], tied: bool, dtype: str, deterministic: bool, kernels: str
) -> None:
    first, second = folders(tied, 1), folders(tied, 2)
    with InferenceEngine(config(second, dtype, deterministic, kernels)) as fresh:
        wanted = fresh.generate(PROMPTS, GREEDY)
    with InferenceEngine(config(first, dtype, deterministic, kernels)) as engine:
        if engine._executor.runner.fast_modules is not None:
            assert engine._executor.runner.fast_modules.count["Linear"] > 0
        else:
            assert engine._executor.off.get("kernels", "")
        before = engine.generate(PROMPTS, GREEDY)
        engine.update_weights(read_folder(str(second)), blocking=True)
        found = engine.generate(PROMPTS, GREEDY)
    assert [sample.weight_version for sample in found] == [1] * len(PROMPTS)
    for sample, old, new in zip(found, before, wanted, strict=True):
        assert sample.completion_tokens == new.completion_tokens
        assert sample.logprobs == new.logprobs
        assert sample.top_logprobs == new.top_logprobs
        assert sample.logprobs != old.logprobs
