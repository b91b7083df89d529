"""Models with recurrent state: tokens and logprobs of Transformers' `generate`, and the same bits
alone, beside others, in chunks, preempted, with a shared prefill, and from a snapshot."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from nano_inference.bus.messages import AdmittedRequest, Prompt, RequestInfo, SequenceSpec
from nano_inference.bus.parts.states import StatePlan, StateSave, StateStart
from nano_inference.config import EngineConfig, SamplingParams
from nano_inference.stages.executor import ExecutorCore, wrap_model
from nano_inference.stages.executor.driver.states import SequenceStates
from nano_inference.stages.executor.runner.mixers import step as mixers_step
from nano_inference.stages.executor.runner.state.segments import segments_of

from ...soaking import in_soak
from .lane import Answer, Lane
from .models import RECURRENT, VOCAB, make_model
from .plans import new_sequence, step_plan
from .references import generate
from .report import MAX_DIFFERENCE

EVERY_DAY = ("lfm2", "qwen3_5_text", "bamba", "jamba", "minimax")
"""One for each operator."""

KINDS = [name if name in EVERY_DAY else in_soak(name) for name in RECURRENT]
EXACT = [name if name in ("lfm2", "qwen3_5_text") else in_soak(name) for name in RECURRENT]

NEW_TOKENS = 8
LENGTHS = (34, 9, 2)


SETTINGS = EngineConfig(
    deterministic=True, max_model_len=96, block_size=4, max_batch_size=4, kv_cache_bytes=1 << 22
)


@cache
def core_of(name: str) -> ExecutorCore:
    return ExecutorCore(SETTINGS, model=wrap_model(make_model(name), 96))


def prompts_of(name: str) -> list[list[int]]:
    """Two that begin alike, and shorter ones."""
    rng = random.Random(name)

    def draw(number: int) -> list[int]:
        return [rng.randrange(1, VOCAB) for _ in range(number)]

    first, *others = map(draw, LENGTHS)
    return [first, first[:17] + draw(17), *others]


def lane_of(name: str, *, preempt_every: int = 0, **settings: Any) -> Lane:
    core = core_of(name)
    core.reset()
    config = msgspec.structs.replace(SETTINGS, **settings)
    return Lane(config, core, preempt_every=preempt_every, flush_every=3)


def bits(answers: Iterable[Answer]) -> list[tuple[list[int], list[float]]]:
    return [(each.token_ids, each.logprobs) for each in answers]


@pytest.mark.parametrize("name", KINDS)
def test_greedy_tokens_are_those_of_generate(name: str) -> None:
    model, prompts, lane = make_model(name), prompts_of(name), lane_of(name)
    cold, warm = lane.run(prompts, NEW_TOKENS), lane.run(prompts, NEW_TOKENS)
    assert cold[1].num_cached == 16
    assert [each.num_cached for each in warm] == [32, 32, 8, 0]
    for prompt, *answers in zip(prompts, cold, warm, strict=True):
        tokens, logits = generate(model, [prompt], NEW_TOKENS)
        wanted = logits.log_softmax(-1).gather(-1, tokens[..., None])[0, :, 0]
        for answer in answers:
            assert answer.token_ids == tokens[0].tolist()
            found = torch.tensor(answer.logprobs, dtype=torch.float64)
            assert (found - wanted).abs().max() < MAX_DIFFERENCE


@pytest.mark.soak
@pytest.mark.parametrize("name", EXACT)
def test_bits_depend_on_the_sequence_alone(name: str, soak: bool) -> None:
    prompts = prompts_of(name)
    alone = lane_of(name)
    wanted = [bits(alone.run([prompt], NEW_TOKENS))[0] for prompt in prompts]
    assert bits(alone.run(prompts, NEW_TOKENS)) == wanted  # warm, and beside others
    for chunk in range(1, 71) if soak else (1, 3, 16):
        chunked = lane_of(name, max_tokens_per_batch=chunk, max_batch_size=min(chunk, 4))
        assert bits(chunked.run(prompts, NEW_TOKENS)) == wanted, chunk
    for every in range(1, 13) if soak else (3,):
        preempted = lane_of(name, preempt_every=every)
        assert bits(preempted.run(prompts, NEW_TOKENS)) == wanted, every
        assert preempted.preempted


def run_shared(name: str) -> None:
    """Check that samples of one prompt, of which one computes it, have the bits of one alone."""
    (prompt, *_) = prompts_of(name)
    wanted = bits(lane_of(name).run([prompt], NEW_TOKENS))[0]
    lane = lane_of(name)
    lane.batching.restart(lane.core.capacity())
    lane._answers = {seq_id: Answer(prompt) for seq_id in (1, 2, 3)}
    specs = tuple(SequenceSpec(seq_id, seq_id - 1, seed=0) for seq_id in lane._answers)
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    info = RequestInfo("r", "r")
    lane.computed = lane.part_rows = lane.largest_row = 0
    lane.batching.add(AdmittedRequest(info, Prompt(tuple(prompt)), sampling, specs, "", 0))
    lane.finish()
    assert lane.computed == len(prompt) + 3 * (NEW_TOKENS - 1)
    assert bits(lane._answers.values()) == [wanted] * 3


def run_from_snapshots(name: str, places: Sequence[int]) -> None:
    """Check that sequences that start from snapshots have the bits of one that computes all."""
    (prompt, *_) = prompts_of(name)
    core = core_of(name)
    core.reset()
    own, blocks = SamplingParams(temperature=0.0, max_tokens=1), range(len(prompt) // 4 + 1)
    saves = tuple(StateSave(1, place, place) for place in places)
    first = step_plan(1, new=(new_sequence(1, prompt, blocks, own),), rows={1: len(prompt)})
    wanted = core.execute(replace_parts(first, StatePlan(saves)))
    for number, place in enumerate(places, 2):
        again = new_sequence(number, prompt, blocks, own, num_cached=place)
        again = replace_parts(again, StateStart(place))
        plan = step_plan(
            number, new=(again,), rows={number: len(prompt) - place}, finished=(number - 1,)
        )
        found = core.execute(plan)
        assert (found.token_ids, found.logprobs) == (wanted.token_ids, wanted.logprobs), place


def replace_parts(message: Any, *parts: object) -> Any:
    return msgspec.structs.replace(message, parts=parts)


@pytest.mark.parametrize("name", EXACT)
def test_samples_of_a_prompt_go_on_from_copies_of_its_state(name: str) -> None:
    run_shared(name)


@pytest.mark.soak
@pytest.mark.parametrize("name", EXACT)
def test_a_snapshot_is_the_state_after_its_tokens(name: str, soak: bool) -> None:
    run_from_snapshots(name, range(1, 34) if soak else (1, 2, 17, 33))


def miss_a_window(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Snapshots lack one layer's window."""
    plain = SequenceStates.add

    def add(self: SequenceStates, new: Any) -> None:
        kept = self._cache.in_slots
        self._cache.in_slots = kept[1:]
        try:
            plain(self, new)
        finally:
            self._cache.in_slots = kept

    patch.setattr(SequenceStates, "add", add)
    return lambda: run_from_snapshots("lfm2", (17,))


def save_late(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Snapshots are made one token late."""

    def late(rows: Any) -> Any:
        saves = rows.saves
        late = None if saves is None else saves + np.array([0, 1, 0])
        return segments_of(replace(rows, saves=late))

    patch.setattr(mixers_step, "segments_of", late)
    return lambda: run_from_snapshots("qwen3_5_text", (17,))


def share_a_slot(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Samples of a prompt read and write the first one's state."""
    plain = SequenceStates.put_in

    def share(*each: Any) -> Any:
        rows = plain(*each)
        return replace(rows, states=np.zeros_like(rows.states))

    patch.setattr(SequenceStates, "put_in", share)
    return lambda: run_shared("qwen3_5_text")


@pytest.mark.parametrize("defect", [miss_a_window, save_late, share_a_slot])
def test_a_planted_defect_is_found(defect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = defect(monkeypatch)
    with pytest.raises(AssertionError):
        run()


def test_a_cached_prefix_needs_a_snapshot() -> None:
    core = core_of("lfm2")
    core.reset()
    new = new_sequence(1, range(1, 9), (0, 1), SamplingParams(max_tokens=1), num_cached=4)
    with pytest.raises(ValueError, match="a sequence with cached tokens needs a snapshot"):
        core.execute(step_plan(1, new=(new,), rows={1: 4}))


def test_other_callers_of_a_shared_model_run_its_own_code() -> None:
    module = make_model("qwen3_5_text")
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    wanted = module(input_ids=ids).logits
    core = ExecutorCore(EngineConfig(max_model_len=96), model=wrap_model(module, 96), num_blocks=9)
    module.set_attn_implementation("eager")
    assert torch.equal(module(input_ids=ids, use_cache=False).logits, wanted)
    core.close()
    assert torch.equal(module(input_ids=ids, use_cache=False).logits, wanted)
