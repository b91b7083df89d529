"""Speculation, with predictions and draft models, too: it changes no token."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from nano_inference import (
    Completion,
    EngineConfig,
    InferenceEngine,
    Pipeline,
    SamplingParams,
)
from nano_inference.stages.executor.core import ExecutorCore
from nano_inference.stages.executor.driver.speculation.drafts import (
    NO_DRAFT,
    Draft,
    DraftContext,
    DraftSource,
)
from nano_inference.stages.executor.parts import speculation
from nano_inference.stages.executor.parts.speculation import Speculation

from .. import oracle
from ..stages.executor.driver.speculation.drafting import VerifyAll
from . import reference, short_model
from .builders import State, break_once, check_purity, check_stamps, find_pure_logprob
from .conftest import MakeConfig, both_buses
from .test_weights import under_load

SHORT_MODEL = True
Answers = dict[tuple[int, ...], list[tuple[int, ...]]]


class Prophet(DraftSource):
    """Drafts from answers that are known, by prompt, with one error in five tokens."""

    name: ClassVar[str] = "made up"

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._random = random.Random(1)

    def _propose(self, context: DraftContext) -> Draft:
        prompt = tuple(context.tokens[: context.num_prompt].tolist())
        generated = tuple(context.tokens[context.num_prompt :].tolist())
        for answer in self._answers.get(prompt, ()):
            if answer[: len(generated)] == generated:
                coming = answer[len(generated) : len(generated) + context.limit]
                tokens = tuple(t if self._random.random() < 0.8 else 5 for t in coming)
                return Draft(tokens, source=self.name) if tokens else NO_DRAFT
        return NO_DRAFT


class Repeat(DraftSource):
    """Drafts the last token again and again."""

    name: ClassVar[str] = "made up"

    def _propose(self, context: DraftContext) -> Draft:
        return Draft((int(context.tokens[-1]),) * context.limit, source=self.name)


def speculate(monkeypatch: pytest.MonkeyPatch, source: DraftSource) -> None:
    """Engines with speculation take all drafts of this source."""

    monkeypatch.setattr(speculation, "make_sources", lambda *_: [source])
    monkeypatch.setattr(speculation, "CostControl", lambda _: VerifyAll())
    monkeypatch.setattr(Speculation, "_measure_costs", lambda _: None)


STOPS = {"stop": [" and "], "min_tokens": 3}
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}
REQUESTS: list[dict[str, Any]] = [
    {
        "prompt": f"Story about {name}, a dog and a {colour} hat:" + " So it was." * number,
        "n": 1 + number % 3,
        "stream": number % 2 == 0,
        "sampling": {"max_tokens": 30 + 7 * number, "seed": number, "logprobs": 2} | more,
    }
    for number, (name, colour, more) in enumerate(
        (
            ("Ana", "red", {"temperature": 0}),
            ("Ben", "blue", {"ignore_eos": True}),
            ("Cleo", "green", {"temperature": 0.7, "top_k": 20, "top_p": 0.9}),
            ("David", "red", STOPS),
            ("Eve", "grey", PENALTIES),
            ("Finn", "blue", {"constraint": {"regex": "[a-c]{12}( [d-f]{3}){4}"}}),
            ("Gina", "red", {"logit_bias": {"68": 2.0}, "min_p": 0.05}),
            ("Hugo", "grey", {"ignore_eos": True, "max_draft_tokens": 2}),
        )
    )
]

Recorded = tuple[Any, ...]


async def told_by(pipeline: Pipeline, number: int) -> tuple[Completion, list[Recorded]]:
    """Return a request's completion, and each sample without its logprobs."""
    chunked = [""] * 3
    completion = None
    async for output in pipeline.submit(REQUESTS[number]):
        if isinstance(output, Completion):
            completion = output
        else:
            chunked[output.sample_index] += output.text
    assert completion is not None
    assert completion.status == "done", completion.error
    samples = completion.samples
    if REQUESTS[number]["stream"]:
        assert chunked[: len(samples)] == [sample.text for sample in samples]
    return completion, [
        (
            sample.token_ids,
            sample.text,
            sample.finish_reason,
            [[top.token_id for top in tops] for tops in sample.top_logprobs or ()],
        )
        for sample in samples
    ]


async def all_told(
    pipeline: Pipeline, meanwhile: Callable[[], Any] | None = None
) -> list[tuple[Completion, list[Recorded]]]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(told_by(pipeline, n)) for n in range(len(REQUESTS))]
        if meanwhile is not None:
            group.create_task(meanwhile())
    return [task.result() for task in tasks]


@both_buses()
async def test_answers_are_bitwise_equal_under_load_and_failures(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences take turns and are preempted, the executor fails, generation pauses."""
    few = {"engine__max_batch_size": 6, "engine__kv_cache_bytes": 1 << 18}
    turns = {"fairness__max_timeslice_tokens": 16, "pipeline__restart_backoff_s": 0.01}
    async with Pipeline(make_config()) as pipeline:
        expected = await all_told(pipeline)
    answers: Answers = {}
    for completion, _ in expected:
        assert not completion.usage.accepted_prediction_tokens
        known = answers.setdefault(completion.prompt_token_ids, [])
        known += [sample.token_ids for sample in completion.samples]
    speculate(monkeypatch, Prophet(answers))
    break_once(monkeypatch, ExecutorCore, "execute", after=15)
    few["engine__max_model_len"] = 256
    config = make_config(engine__speculation="auto", engine__max_draft_tokens=6, **few, **turns)
    async with Pipeline(config) as pipeline:

        async def pauses() -> None:
            for in_flight in ("keep", "retract"):
                await asyncio.sleep(0.05)
                await pipeline.client.pause(in_flight=in_flight)
                await pipeline.client.resume()

        found = await all_told(pipeline, pauses)
    for (one, told), (other, wanted) in zip(found, expected, strict=True):
        assert told == wanted
        for sample, same in zip(one.samples, other.samples, strict=True):
            assert sample.logprobs == pytest.approx(same.logprobs, abs=1e-4)
    usages = [completion.usage for completion, _ in found]
    assert sum(usage.accepted_prediction_tokens for usage in usages) > 100
    assert sum(usage.rejected_prediction_tokens for usage in usages) > 10


@pytest.mark.parametrize("in_flight", ["keep", "retract"])
async def test_tokens_of_a_draft_have_the_weights_that_verified_it(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, in_flight: Any
) -> None:
    """Weights that repeat their version's token, and change: drafts are right until then."""
    loaded: State = dict(reference.model(short_model.folder()).state_dict())
    speculate(monkeypatch, Repeat())
    config = make_config(engine__speculation="auto")
    pure_logprob = find_pure_logprob(loaded, config.engine.dtype)

    def check(completion: Completion) -> int:
        if in_flight == "keep":
            return check_stamps(completion)
        return check_purity(completion, pure_logprob, whole=True)

    spell = oracle.announcing if in_flight == "keep" else oracle.remembering
    async with Pipeline(config) as pipeline:
        assert await under_load(pipeline, loaded, spell, in_flight, 12, check)


# --- predictions -----------------------------------------------------------------------------


def test_engine_samples_count_their_drafts() -> None:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    prompts = ["1 2 3 4 5", "Once"]
    with InferenceEngine(EngineConfig(deterministic=True)) as engine:
        alone = engine.generate(prompts, params)
    with InferenceEngine(EngineConfig(deterministic=True, speculation="auto")) as engine:
        predictions = [alone[0].completion_tokens, None]
        found = engine.generate(prompts, params, predictions=predictions)
        engine.add_request(prompts[0], params, prediction=alone[0].completion_tokens)
        while engine.has_pending():
            found += engine.step()
    for sample, wanted in zip(found, [*alone, alone[0]], strict=True):
        assert sample.completion_tokens == wanted.completion_tokens
        assert sample.logprobs == wanted.logprobs
        assert 0 <= sample.num_accepted_draft_tokens <= sample.num_draft_tokens
