"""A model with recurrent state: sequences that start from snapshots have the bits of cold runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import pytest
import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample

from ..stages.executor.models import make_model, save
from .builders import finish

CACHES: tuple[Literal["paged", "radix"], ...] = ("paged", "radix")
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPT = tuple(range(30, 63))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("qwen3_5_text"), tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module", params=CACHES)
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[InferenceEngine]:
    with InferenceEngine(settings(folder, cache_type=request.param)) as engine:
        yield engine


def settings(folder: Path, **more: object) -> EngineConfig:
    common = {"block_size": 4, "max_batch_size": 8, "kv_cache_bytes": 1 << 22}
    return EngineConfig(model_path=str(folder), deterministic=True, **(common | more))


def run(engine: InferenceEngine, *prompts: Sequence[int]) -> list[TrainingSample]:
    ids = [engine.add_request(list(prompt), GREEDY) for prompt in prompts]
    return sorted(finish(engine), key=lambda sample: ids.index(sample.request_id))


def bits(samples: Sequence[TrainingSample]) -> list[tuple[list[int], list[float]]]:
    return [(list(each.completion_tokens), list(each.logprobs)) for each in samples]


def cold(engine: InferenceEngine, *prompts: Sequence[int]) -> list[tuple[list[int], list[float]]]:
    """Return the bits of each prompt on its own, with an empty cache."""
    found = []
    for prompt in prompts:
        engine._batching.cache.flush()
        found += bits(run(engine, prompt))
    engine._batching.cache.flush()
    return found


def talk(engine: InferenceEngine, num_turns: int) -> tuple[list[list[int]], list[int]]:
    """Return the prompts of a conversation, and how many of their tokens each turn computes."""
    prompts, computed, text = [], [], list(PROMPT)
    engine._batching.take_counters()
    for turn in range(num_turns):
        text += [100 + turn, *range(40, 46)]
        prompts.append([*text])
        text += run(engine, text)[0].completion_tokens
        computed.append(engine._batching.take_counters().prefilled)
    return prompts, computed


@pytest.mark.soak
def test_a_turn_computes_its_own_tokens_and_at_most_a_block_of_those_before(
    folder: Path, soak: bool
) -> None:
    """And has the bits of one that computes all."""
    with InferenceEngine(settings(folder, max_model_len=1024)) as engine:
        prompts, computed = talk(engine, 30 if soak else 4)
        for prompt, number in zip(prompts[1:], computed[1:], strict=True):
            # The last sampled token was never computed; 7 tokens are new.
            assert number <= 1 + 7 + 3, number
            assert len(prompt) > number
        warm = bits(run(engine, *prompts))
        assert warm == cold(engine, *prompts)


def test_prompts_with_a_common_beginning_have_the_bits_of_cold_runs(
    engine: InferenceEngine,
) -> None:
    prompts = [[*PROMPT[:23], 7, number, *range(9)] for number in range(5)]
    wanted = cold(engine, *prompts)
    for _ in range(2):
        engine._batching.cache.flush()
        assert bits(run(engine, *prompts)) == wanted  # side by side
        assert bits(run(engine, *prompts)) == wanted  # from snapshots
    one_by_one = [bits(run(engine, prompt))[0] for prompt in prompts]
    assert one_by_one == wanted


def test_an_aborted_request_leaves_right_snapshots(engine: InferenceEngine) -> None:
    wanted = cold(engine, PROMPT)
    for steps in (1, 3, 6):
        name = engine.add_request(list(PROMPT), GREEDY)
        for _ in range(steps):
            engine.step()
        engine.abort(name)
        assert bits(run(engine, PROMPT)) == wanted
        engine._batching.check()


@pytest.mark.parametrize("mode", ["keep", "retract", "abort"])
def test_no_state_of_older_weights_is_found(
    engine: InferenceEngine, mode: Literal["keep", "retract", "abort"]
) -> None:
    run(engine, PROMPT)
    engine.add_request(list(PROMPT), GREEDY)
    for _ in range(6):
        engine.step()
    torch.manual_seed(engine.get_weight_version())
    engine.update_weights(
        {name: each + 0.02 * torch.randn_like(each) for name, each in engine.state_dict().items()},
        in_flight=mode,
    )
    finish(engine)
    again = [*PROMPT, 5, 6]
    first, second = (bits(run(engine, PROMPT, again)) for _ in range(2))
    assert first == second == cold(engine, PROMPT, again)
