"""A prompt's vector is the whole answer to its request."""

from __future__ import annotations

from array import array

import msgspec
from transformers import PreTrainedTokenizerFast

from nano_inference.bus.control import Cancel
from nano_inference.bus.messages import RecoveryItem, StepResult
from nano_inference.bus.pooling import PooledPrompt, Pooling
from nano_inference.bus.public import Completion, CompletionSample, Usage
from nano_inference.stages.streaming.core import Deliveries, StreamingCore
from nano_inference.stages.streaming.measures import measure_end
from nano_inference.telemetry.instruments import (
    DECODE_DURATION,
    PREFILL_DURATION,
    REQUEST_DURATION,
    TIME_TO_FIRST_TOKEN,
    TOKEN_USAGE,
    WEIGHT_STALENESS,
)

from ...measured import Measured
from .test_core import info_of, started, step

VECTOR = (0.5, -0.25, 1.0)
INFO = info_of(stream=False, pooling=Pooling("mean", True, 3))


def pooled(step_result: StepResult, *seq_ids: int) -> StepResult:
    vector = array("f", VECTOR).tobytes()
    return msgspec.structs.replace(
        step_result, pooled=tuple(PooledPrompt(seq_id, vector) for seq_id in seq_ids)
    )


def completion_of(deliveries: Deliveries) -> Completion:
    ((key, (completion,)),) = deliveries.outputs
    assert isinstance(completion, Completion)
    assert key == completion.request_id
    return completion


def test_the_completion_has_the_vector_and_no_token(tokenizer: PreTrainedTokenizerFast) -> None:
    core = StreamingCore(tokenizer)
    assert core.absorb(step(new=[started(1, INFO)]), 250).outputs == []
    deliveries = core.absorb(pooled(step(weight_version=4, end_ns=300), 1), 350)
    completion = completion_of(deliveries)
    assert completion.samples == (
        CompletionSample(
            sample_index=0,
            text="",
            token_ids=(),
            logprobs=(),
            finish_reason="stop",
            weight_version=4,
            embedding=VECTOR,
        ),
    )
    assert (completion.status, completion.usage) == ("done", Usage(prompt_tokens=7))
    assert completion.timings.first_token_ns == 0
    assert [each.stage for each in completion.timings.stages][-2:] == ["executor", "streaming"]
    assert (len(core), deliveries.halts, deliveries.to_score) == (0, (), ())


def test_its_times_are_those_of_a_prompt_and_its_tokens_those_of_an_embedding(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """There is no first token, and nothing is said of one."""
    measured = Measured()
    core = StreamingCore(tokenizer)
    core.absorb(step(new=[started(1, INFO)], end_ns=200), 250)
    (ended,) = core.absorb(pooled(step(end_ns=300), 1), 350).ended
    measure_end(measured.metrics, ended, 0)
    embeddings = ("embeddings", "nano-inference", "tiny")
    assert measured.values(REQUEST_DURATION) == {(*embeddings, ""): 1}
    assert measured.sums(TOKEN_USAGE) == {(*embeddings, "input"): 7, (*embeddings, "output"): 0}
    assert measured.values(PREFILL_DURATION) == {("0",): 1}
    for instrument in (TIME_TO_FIRST_TOKEN, DECODE_DURATION, WEIGHT_STALENESS):
        assert measured.values(instrument) == {}


def test_a_vector_that_comes_too_late_counts_for_nothing(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    core = StreamingCore(tokenizer)
    core.absorb(step(new=[started(1, INFO)]), 250)
    cancelled = core.end(Cancel("r", "entry-r", "cancelled", "cancelled", "enough"), 260)
    (sample,) = completion_of(cancelled).samples
    assert (sample.finish_reason, sample.embedding) == ("abort", None)
    assert core.absorb(pooled(step(), 1), 350).outputs == []


def test_after_a_failure_the_prompt_begins_again(tokenizer: PreTrainedTokenizerFast) -> None:
    core = StreamingCore(tokenizer)
    core.absorb(step(new=[started(1, INFO)]), 250)
    core.reset()
    item = RecoveryItem("r", "entry-r", INFO)
    (sample,) = core.recovered(item).samples
    assert (sample.token_ids, sample.finished) == ((), False)
    core.absorb(step(new=[started(9, INFO)]), 400)
    assert completion_of(core.absorb(pooled(step(), 9), 450)).samples[0].embedding == VECTOR


def test_a_lane_without_a_tokenizer_s_texts_embeds() -> None:
    core = StreamingCore(None)
    result = pooled(
        step(new=[started(1, INFO), started(2, info_of("s", pooling=INFO.pooling))]), 1, 2
    )
    deliveries = core.absorb(result, 250)
    assert [key for key, _ in deliveries.outputs] == ["r", "s"]
