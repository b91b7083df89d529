"""Drafts change no token and no logprob, whatever they are."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.config import Constraint, EngineConfig, SamplingParams
from nano_inference.stages.executor import ExecutorCore, LoadedModel, load_model
from nano_inference.stages.executor.runner.adapters.peft import AdapterLimits, read_adapter

from .....soaking import in_soak
from ...models import VOCAB
from ...plans import PROMPT
from .drafting import CONFIG, DraftingLane, Row, VerifyAll, assert_same

pytestmark = pytest.mark.usefixtures("unmeasured")
SCHEMA = '{"type": "object", "properties": {"a": {"enum": ["one", "two"]}}, "required": ["a"]}'

Request = tuple[SamplingParams, list[int]] | tuple[SamplingParams, list[int], str]
"""The third is an adapter's name."""


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model(EngineConfig(dtype="float32", max_model_len=256))


samplings = st.builds(
    partial(msgspec.structs.replace, SamplingParams()),  # min_tokens may be above max_tokens
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    max_tokens=st.integers(1, 30),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([1.0, 0.6]),
    min_p=st.sampled_from([0.0, 0.2]),
    stop_token_ids=st.sampled_from([frozenset(), frozenset(range(0, VOCAB, 12))]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    logit_bias=st.sampled_from([{}, {5: 4.0, 9: -3.0}]),
    min_tokens=st.sampled_from([0, 6]),
    logprobs=st.sampled_from([0, 2]),
    max_draft_tokens=st.sampled_from([None, None, 0, 2]),
)
requests = st.lists(st.tuples(samplings, st.integers(1, 9).map(lambda n: PROMPT[:n])), max_size=9)


def answers(
    model: LoadedModel,
    asked: list[Request],
    config: EngineConfig = CONFIG,
    drafts: tuple[dict[int, list[Row]], float, int] | None = None,
    control: VerifyAll | None = None,
    adapters: Mapping[str, Path] = MappingProxyType({}),
    **options: Any,
) -> DraftingLane:
    """A lane that has answered all rows, with or without drafts."""
    config = msgspec.structs.replace(config, speculation="off" if drafts is None else "auto")
    core = ExecutorCore(config, model=model, **options)
    for name, path in adapters.items():
        core.runner.adapters.put(read_adapter(name, 1, str(path), model, AdapterLimits()))
    lane = DraftingLane(config, core)
    if drafts is not None:
        lane.draft(*drafts, control=control)
    for seq_id, request in enumerate(asked, 1):
        lane.add(seq_id, *request)
    lane.run()
    return lane


@pytest.mark.soak
@settings(max_examples=settings.default.max_examples // 8, deadline=None)
@given(
    asked=requests,
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    cache_type=st.sampled_from(["radix", "paged"]),
    runs_ahead=st.booleans(),
    num_blocks=st.sampled_from([24, 200]),
    seed=st.integers(0, 1000),
)
def test_any_drafts_leave_every_answer_as_it_is(
    model: LoadedModel,
    asked: list[Request],
    right: float,
    cache_type: Any,
    runs_ahead: bool,
    num_blocks: int,
    seed: int,
) -> None:
    """With every sampling setting, few blocks (so that some are preempted) and many."""
    config = msgspec.structs.replace(CONFIG, cache_type=cache_type)
    expected = answers(model, asked, config, num_blocks=num_blocks)
    lane = answers(
        *(model, asked, config, (expected.found, right, seed)),
        num_blocks=num_blocks,
        runs_ahead=runs_ahead,
    )
    assert_same(lane.found, expected.found)


def test_right_drafts_take_fewer_steps_and_wrong_ones_take_none(model: LoadedModel) -> None:
    asked: list[Request] = [(SamplingParams(max_tokens=32), PROMPT)] * 2
    expected = answers(model, asked)
    right = answers(model, asked, drafts=(expected.found, 1.0, 1))
    assert_same(right.found, expected.found)
    assert right.accepted == right.drafted > 40
    assert right.steps < expected.steps / 2
    wrong = answers(model, asked, drafts=(expected.found, 0.0, 1))
    assert_same(wrong.found, expected.found)
    assert wrong.accepted < wrong.drafted / 10
    assert wrong.steps <= expected.steps


class AskedSeldom(VerifyAll):
    """Says each third time that drafts would not pay in this step and the next five.

    Attributes:
        asked: Steps in which it was asked.
    """

    asked = 0

    def begin(self, num_rows: int, num_prefill: int, context: float) -> bool:
        self.asked += 1
        return super().begin(num_rows, num_prefill, context) and self.asked % 3 > 0

    def rest(self) -> int:
        return 5


def test_resting_drafts_are_not_asked(model: LoadedModel) -> None:
    sampling = SamplingParams(max_tokens=50)
    asked = [(sampling, PROMPT), (sampling, PROMPT[:3])]
    without = answers(model, asked)
    control = AskedSeldom()
    lane = answers(model, asked, drafts=(without.found, 0.5, 0), control=control)
    assert_same(lane.found, without.found)
    assert lane.accepted > 0
    assert lane.steps < without.steps
    assert control.asked < 0.7 * lane.steps


@pytest.mark.parametrize("kernels", ["auto", in_soak("off")])
def test_steps_of_hundreds_of_drafted_rows_leave_every_bit(
    model: LoadedModel, kernels: Literal["auto", "off"]
) -> None:
    config = msgspec.structs.replace(
        CONFIG,
        deterministic=True,
        kernels=kernels,
        max_batch_size=12,
        max_tokens_per_batch=512,
        max_draft_tokens=30,
    )
    asked: list[Request] = [
        (SamplingParams(temperature=number % 3 / 2, max_tokens=50), PROMPT[: 1 + number % 9])
        for number in range(12)
    ]
    expected = answers(model, asked, config)
    lane = answers(model, asked, config, (expected.found, 0.95, 4), control=VerifyAll(512))
    assert lane.most_rows > 128
    assert lane.found == expected.found


@pytest.mark.parametrize("right", [1.0, 0.7, 0.0])
def test_grammars_are_followed_with_a_draft_model(tiny: LoadedModel, right: float) -> None:
    config = EngineConfig(dtype="float32", max_batch_size=6, max_model_len=256)
    stops = frozenset({0, 2})
    constraints = (
        Constraint(json_schema=SCHEMA),
        Constraint(regex="(ab|cd){3}"),
        Constraint(regex="a{40}"),
        # Its mark is one token, or several that spell it.
        Constraint(regex="(<think>|</think>){12}"),
        # As a budget of reasoning: llguidance can't go back in such a grammar.
        Constraint(lark='start: word "." /[0-9]{3}/\nword[max_tokens=6]: /[a-z ]+/'),
        None,
    )
    asked: list[Request] = [
        (SamplingParams(max_tokens=40, stop_token_ids=stops, constraint=constraint), [5, 6, 7])
        for constraint in constraints
        for _ in range(2)
    ]
    expected = answers(tiny, asked, config)
    lane = answers(tiny, asked, config, (expected.found, right, 3))
    assert_same(lane.found, expected.found)
    assert lane.drafted
