"""Names, spans and metrics follow OpenTelemetry's conventions for generative AI."""

from __future__ import annotations

from typing import Any

from opentelemetry.semconv import schemas
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics

from nano_inference.bus.public import (
    Completion,
    CompletionSample,
    GenerateRequest,
    Session,
    Usage,
)
from nano_inference.config import Constraint, SamplingParams
from nano_inference.telemetry import Operation, instruments, names
from nano_inference.telemetry.spans import scope

from ..measured import Measured

SECOND = 1_000_000_000


def in_registry(module: Any, prefix: str) -> set[str]:
    return {
        value
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, str) and value.startswith(prefix)
    }


def ended(**fields: Any) -> Completion:
    sample = CompletionSample(
        sample_index=0, text="", token_ids=(1, 2), logprobs=(0.0, 0.0), finish_reason="stop"
    )
    usage = Usage(prompt_tokens=5, cached_tokens=3, completion_tokens=2)
    made = {"request_id": "r", "entry_id": "0-1", "model": "tiny", "status": "done"}
    return Completion(**{**made, "samples": (sample,), "usage": usage, **fields})


def test_names_and_metrics_are_those_of_the_registry() -> None:
    ours = {value for value in vars(names).values() if isinstance(value, str)}
    assert in_registry(names, "gen_ai.") <= in_registry(gen_ai_attributes, "gen_ai.")
    assert {each for each in ours if each.startswith("gen_ai.")}
    metrics = in_registry(gen_ai_metrics, "gen_ai.")
    found = {each.name for each in instruments.INSTRUMENTS if each.name.startswith("gen_ai.")}
    assert found <= metrics
    assert {each for each in metrics if each.startswith("gen_ai.server.")} <= found
    assert schemas.Schemas(names.SCHEMA_URL) is list(schemas.Schemas)[-1]
    assert scope().version


def test_buckets_are_those_of_the_conventions() -> None:
    assert instruments.REQUEST_DURATION.buckets == instruments.OPERATION_DURATION.buckets
    assert instruments.REQUEST_DURATION.buckets[:3] == (0.01, 0.02, 0.04)
    assert instruments.REQUEST_DURATION.buckets[-1] == 81.92
    assert instruments.TIME_TO_FIRST_TOKEN.buckets[::5] == (0.001, 0.06, 0.75, 10.0)
    assert instruments.TIME_PER_OUTPUT_TOKEN.buckets[::6] == (0.01, 0.2, 2.5)
    assert instruments.TOKEN_USAGE.buckets[-1] == 67_108_864


def test_a_conversation_s_span_has_its_parameters_and_its_answer() -> None:
    sampling = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=4, seed=7, constraint=Constraint(json_object=True)
    )
    request = GenerateRequest(
        prompt="1", is_chat=True, n=2, sampling=sampling, session=Session(id="talk")
    )
    operation = Operation(SECOND, "tiny", "chatcmpl-1", named="mine")
    operation.begin(request)
    assert operation.span_name == "chat mine"
    operation.first_chunk_ns = SECOND * 3 // 2
    operation.end(ended())
    assert operation.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "nano-inference",
        "gen_ai.request.model": "mine",
        "gen_ai.conversation.id": "talk",
        "gen_ai.output.type": "json",
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 256,
        "gen_ai.request.seed": 7,
        "gen_ai.request.stream": True,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 4.0,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.time_to_first_chunk": 0.5,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 2,
    }


def test_several_requests_of_a_call_are_one_operation() -> None:
    measured = Measured()
    operation = Operation(SECOND, "tiny", "")
    for _ in range(2):
        operation.begin(GenerateRequest(prompt="1", stream=False))
        operation.end(ended())
    found = operation.attributes
    assert found[names.OUTPUT_TOKENS] == 4
    assert found[names.FINISH_REASONS] == ("stop", "stop")
    assert names.RESPONSE_ID not in found
    operation.measure(measured.metrics, 3 * SECOND, "")
    key = ("text_completion", "nano-inference", "tiny", "")
    assert measured.values(instruments.OPERATION_DURATION) == {key: 1}
    assert measured.values(instruments.TIME_TO_FIRST_CHUNK) == {}
