"""Tools as they are given here, and an engine that says what it is told to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from nano_inference.bus.messages import RowFinish
from nano_inference.bus.public import CompletionChunk, GenerateRequest, Output

from ...fake import completion
from ...sampled import ids, joined, make

WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "How it is there",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
TIME: dict[str, Any] = {"name": "time", "input_schema": {"type": "object", "properties": {}}}

Outputs = Callable[[GenerateRequest], list[Output]]


def call(name: str, arguments: str) -> str:
    """Return a call in the model's form."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def says(*texts: str, end: RowFinish = "stop", sizes: Sequence[int] = (0,)) -> Outputs:
    """Answers one request after the other with these texts.

    Args:
        end: How all of them end.
        sizes: How many tokens beside the first there are in a chunk, over and over.
    """
    left = list(texts)

    def outputs(request: GenerateRequest) -> list[Output]:
        chunks, sample, _ = make(ids(left.pop(0)), request.sampling.stop, end)
        told: list[CompletionChunk] = joined(chunks, list(sizes)) if request.stream else []
        named = [msgspec.structs.replace(each, request_id=request.request_id) for each in told]
        return [*named, completion(request, sample)]

    return outputs
