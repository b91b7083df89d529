"""A prompt's vector is the whole answer to its request."""

from __future__ import annotations

from array import array
from typing import Any

from nano_inference.bus.pooling import PooledPrompt
from nano_inference.bus.public import Completion, CompletionSample, Usage
from nano_inference.bus.recovery import RecoveryItem
from nano_inference.stages.streaming.deliveries import Deliveries
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
from .client import Client, cancel_of, request_of, started, tokens_of

VECTOR = (0.5, -0.25, 1.0)
REQUEST = request_of(stream=False, embeds=True)


def pooled(*seq_ids: int) -> dict[str, Any]:
    vector = array("f", VECTOR).tobytes()
    return {"pooled": tuple(PooledPrompt(seq_id, vector) for seq_id in seq_ids)}


def completion_of(deliveries: Deliveries) -> Completion:
    ((key, (completion,)),) = deliveries.outputs.items()
    assert isinstance(completion, Completion)
    assert key == completion.request_id
    return completion


def test_the_completion_has_the_vector_and_no_token(client: Client) -> None:
    assert client.step(new=[started(1, REQUEST)]).outputs == {}
    deliveries = client.step(weight_version=4, end_ns=300, **pooled(1))
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
    assert (completion.status, tokens_of(completion.usage)) == ("done", Usage(prompt_tokens=7))
    assert completion.timings.first_token_ns == 0
    assert [each.stage for each in completion.timings.stages][-2:] == ["executor", "streaming"]
    assert (len(client.core), deliveries.halts, deliveries.to_score) == (0, [], [])


def test_an_embedding_is_measured_without_token_times(
    client: Client,
) -> None:
    """There is no first token, and nothing is said of one."""
    measured = Measured()
    client.step(new=[started(1, REQUEST)], end_ns=200)
    (ended,) = client.step(end_ns=300, **pooled(1)).ended
    measure_end(measured.metrics, ended, 0)
    embeddings = ("embeddings", "nano-inference", "tiny")
    assert measured.values(REQUEST_DURATION) == {(*embeddings, ""): 1}
    assert measured.sums(TOKEN_USAGE) == {(*embeddings, "input"): 7, (*embeddings, "output"): 0}
    assert measured.values(PREFILL_DURATION) == {("0",): 1}
    for instrument in (TIME_TO_FIRST_TOKEN, DECODE_DURATION, WEIGHT_STALENESS):
        assert measured.values(instrument) == {}


def test_a_late_vector_is_ignored(client: Client) -> None:
    client.step(new=[started(1, REQUEST)])
    cancelled = client.end(cancel_of())
    (sample,) = completion_of(cancelled).samples
    assert (sample.finish_reason, sample.embedding) == ("abort", None)
    assert client.step(**pooled(1)).outputs == {}


def test_after_a_failure_the_prompt_begins_again(client: Client) -> None:
    client.step(new=[started(1, REQUEST)])
    client.core.reset()
    item = RecoveryItem("r", "entry-r", "r")
    (sample,) = client.core.recovered(item).samples
    assert (sample.token_ids, sample.finished) == ((), False)
    client.step(new=[started(9, REQUEST)])
    assert completion_of(client.step(**pooled(9))).samples[0].embedding == VECTOR


def test_a_core_without_a_tokenizer_embeds() -> None:
    client = Client(None)
    new = [started(1, REQUEST), started(2, request_of("s", embeds=True))]
    deliveries = client.step(new=new, **pooled(1, 2))
    assert list(deliveries.outputs) == ["r", "s"]
