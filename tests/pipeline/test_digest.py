"""One digest of a run's results, however the run went."""

from __future__ import annotations

import asyncio
import hashlib
import random
import struct
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from nano_inference import Completion, EngineConfig, InferenceEngine, Pipeline, SamplingParams
from nano_inference.bus.public import CompletionSample, TokenLogprob
from nano_inference.bus.steps import NewSequence
from nano_inference.config import Constraint
from nano_inference.pipeline.digest import Digest, digest
from nano_inference.stages.batching.stage import BatchingStage
from nano_inference.stages.executor.core import ExecutorCore

from . import short_model
from .builders import asking, break_once, finish, raises
from .conftest import MakeConfig

SHORT_MODEL = True

SAMPLE = CompletionSample(
    sample_index=0,
    text="is not in it",
    token_ids=(5, 6),
    logprobs=(-0.5, -1.0),
    finish_reason="stop",
    top_logprobs=((TokenLogprob(token_id=5, logprob=-0.5),), ()),
)
DONE = Completion(request_id="ä", entry_id="1-0", status="done", samples=(SAMPLE,))


def test_the_digest_is_made_of_these_bytes() -> None:
    """docs/replay.md states them for programs in other languages."""
    content = struct.pack("<I2s", 2, "ä".encode()) + struct.pack("<I4s", 4, b"done")
    content += struct.pack("<I", 0)  # no prompt logprobs
    content += struct.pack("<I", 1)  # one sample
    content += struct.pack("<II4s", 0, 4, b"stop")
    content += struct.pack("<I2i", 2, 5, 6)
    content += struct.pack("<I2f", 2, -0.5, -1.0)
    content += struct.pack("<I", 2)
    content += struct.pack("<Ii", 1, 5) + struct.pack("<If", 1, -0.5)
    content += struct.pack("<I", 0) + struct.pack("<I", 0)
    content += struct.pack("<I", 0)  # no vector
    whole = b"nano-inference digest 1" + hashlib.sha256(content).digest()
    assert digest([DONE]) == hashlib.sha256(whole).hexdigest()


@pytest.mark.parametrize(
    "changed",
    [
        {"request_id": "b"},
        {"status": "cancelled"},
        {"samples": (replace(SAMPLE, token_ids=(5, 7)),)},
        {"samples": (replace(SAMPLE, logprobs=(-0.5, -1.0000001)),)},
        {"samples": (replace(SAMPLE, finish_reason="length"),)},
        {"samples": (replace(SAMPLE, top_logprobs=None),)},
        {"samples": (replace(SAMPLE, embedding=(0.0,)),)},
        {"samples": ()},
        {"prompt_logprobs": (None, -1.0)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_each_result_counts(changed: dict[str, Any]) -> None:
    assert digest([replace(DONE, **changed)]) != digest([DONE])


def test_only_results_count_and_in_the_order_of_their_ids() -> None:
    other = replace(DONE, request_id="b", samples=(SAMPLE, replace(SAMPLE, sample_index=1)))
    timed = replace(other, samples=other.samples[::-1], entry_id="7-0", trace_id="f" * 32)
    assert digest([DONE, other]) == digest([timed, DONE])
    found = Digest()
    found.add(DONE)
    with raises("duplicate_request"):
        found.add(DONE)


# --- runs -----------------------------------------------------------------------------------------

SAMPLING: Sequence[dict[str, Any]] = (
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 1.0, "seed": 4, "logprobs": 2},
    {"temperature": 0.7, "repetition_penalty": 1.1},
    {"temperature": 0, "constraint": {"regex": "[a-z]{3,20}"}, "ignore_eos": False},
    {"temperature": 0.9, "stop": ["e"]},
)


def workload() -> list[dict[str, Any]]:
    """Two turns of each, of prompts that share their beginnings."""
    return [
        asking(
            f"{'12 + 30 = 42. ' * (index % 3)}{index} + 5 =",
            request_id=f"run-{index}",
            n=1 + (index % 4 == 1),
            sampling={"max_tokens": 14, "ignore_eos": True, **own},
        )
        for index, own in enumerate([*SAMPLING, *SAMPLING])
    ]


def run_engine(order: int = 0, **settings: Any) -> str:
    """The digest of the workload's rollouts."""
    config = {"model_path": str(short_model.folder()), "dtype": "float32", "deterministic": True}
    requests = workload()
    random.Random(order).shuffle(requests)
    with InferenceEngine(EngineConfig(**config | settings)) as engine:
        for request in requests:
            own = dict(request["sampling"])
            own["seed"] = own.get("seed", 11)  # without, the engine's own names make the seeds
            if "constraint" in own:
                own["constraint"] = Constraint(**own["constraint"])
            params, id = SamplingParams(**own), request["request_id"]
            engine.add_request(request["prompt"], params, request["n"], request_id=id)
        return digest(finish(engine))


FEW_BLOCKS = {"max_model_len": 256, "kv_cache_bytes": 1 << 17}


PLAIN_AND_CODES: tuple[dict[str, Any], ...] = ({}, {"quantization": "int8"})


@pytest.mark.parametrize("weights", PLAIN_AND_CODES)
def test_rollouts_have_one_digest(weights: dict[str, Any]) -> None:
    """In another order, with the other cache, few blocks, and drafts."""
    other = {"cache_type": "paged", "block_size": 8, "speculation": "auto", "max_batch_size": 3}
    found = run_engine(order=1, **other, **FEW_BLOCKS, **weights)
    assert found == run_engine(**weights)


@pytest.mark.parametrize("weights", PLAIN_AND_CODES)
async def test_a_run_on_replicas_with_killed_stages_has_the_digest_of_an_undisturbed_one(
    make_config: MakeConfig,
    resumed: list[NewSequence],
    monkeypatch: pytest.MonkeyPatch,
    weights: dict[str, Any],
) -> None:
    own = {f"engine__{name}": value for name, value in weights.items()}

    async def run(**settings: Any) -> str:
        config = make_config(
            engine__deterministic=True, pipeline__restart_backoff_s=0.01, **settings, **own
        )
        requests = workload()
        random.Random(len(settings)).shuffle(requests)
        async with Pipeline(config) as pipeline:
            done = await asyncio.gather(*map(pipeline.complete, requests))
        assert {each.status for each in done} == {"done"}
        return digest(done)

    undisturbed = await run()
    assert not resumed
    break_once(monkeypatch, ExecutorCore, "execute", 9)
    break_once(monkeypatch, BatchingStage, "handle", 40)
    assert await run(pipeline__replicas=2, engine__cache_type="paged") == undisturbed
    assert resumed, "sequences went on after their tokens"
