"""Operations of generative AI, as OpenTelemetry's conventions describe them.

An operation is a request, or all requests of a call. The conventions:
https://github.com/open-telemetry/semantic-conventions-genai
"""

from __future__ import annotations

from typing import Any

from ..bus.public import Completion, GenerateRequest
from . import instruments, names
from .metrics import Metrics

PROVIDER = "nano-inference"


def operation_of(*, embeds: bool, is_chat: bool) -> str:
    """Return an operation's name. `is_chat`: the prompt is a conversation."""
    if embeds:
        return "embeddings"
    return "chat" if is_chat else "text_completion"


def usage_attributes(completion: Completion) -> dict[str, Any]:
    """Return the tokens of a request that has ended, and why its samples ended."""
    usage = completion.usage
    return {
        names.INPUT_TOKENS: usage.prompt_tokens,
        names.CACHED_TOKENS: usage.cached_tokens,
        names.OUTPUT_TOKENS: usage.completion_tokens,
        names.FINISH_REASONS: tuple(sample.finish_reason for sample in completion.samples),
    }


class Operation:
    """One operation, observed where its client is: in the gateway, or in a program.

    Attributes:
        first_chunk_ns: When its first chunk came; 0 before.
    """

    __slots__ = ("_ended", "_id", "_model", "_named", "_requests", "_started_ns", "first_chunk_ns")

    def __init__(self, started_ns: int, model: str, id: str, *, named: str = "") -> None:
        """Args: when its client issued it; its model, if it is known before an answer; the answer's
        id; the model as its client named it. The texts may be empty."""
        self._started_ns, self._model, self._id = started_ns, model, id
        self._named = named or model
        self.first_chunk_ns = 0
        self._requests: list[GenerateRequest] = []
        self._ended: list[Completion] = []

    def begin(self, request: GenerateRequest) -> None:
        """Add a request."""
        self._requests.append(request)

    def end(self, completion: Completion) -> None:
        """Add a terminal message."""
        self._ended.append(completion)

    @property
    def error(self) -> str:
        """The code of its requests' first error; "" for none."""
        return next((each.error.code for each in self._ended if each.error is not None), "")

    @property
    def _name(self) -> str:
        first = self._requests[0]
        chat = first.is_chat or first.messages is not None
        return operation_of(embeds=first.embed is not None, is_chat=chat)

    @property
    def _served(self) -> str:
        """The model that answered; "" if unknown."""
        return (self._ended[0].model if self._ended else "") or self._model

    @property
    def _first_chunk_s(self) -> float | None:
        if not (self.first_chunk_ns and self._requests[0].stream):
            return None
        return max(0, self.first_chunk_ns - self._started_ns) / 1e9

    @property
    def span_name(self) -> str:
        """The name of its span, such as "chat tiny"."""
        model = self._named or self._served
        return f"{self._name} {model}" if model else self._name

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of its span."""
        served, ended = self._served, self._ended
        found: dict[str, Any] = {names.OPERATION: self._name, names.PROVIDER: PROVIDER}
        if model := self._named or served:
            found[names.REQUEST_MODEL] = model
        _add_parameters(found, self._requests[0])
        if not ended:
            return found
        if served:
            found[names.RESPONSE_MODEL] = served
        if len(self._requests) == 1:
            found[names.RESPONSE_ID] = self._id or ended[0].request_id
        if (first_chunk_s := self._first_chunk_s) is not None:
            found[names.TIME_TO_FIRST_CHUNK] = first_chunk_s
        found |= usage_attributes(ended[0])
        for completion in ended[1:]:
            for name, value in usage_attributes(completion).items():
                found[name] += value
        return found

    def measure(self, metrics: Metrics, ended_ns: int, error: str) -> None:
        """Record its duration, and for a stream the time to its first chunk.

        Args:
            metrics: Destination.
            ended_ns: When its client had the whole answer.
            error: The code of the error that ended it; "" for success.
        """
        # Not the model that the client named: its aliases can be any number.
        labels = {names.OPERATION: self._name, names.PROVIDER: PROVIDER}
        if self._served:
            labels[names.REQUEST_MODEL] = self._served
        duration_s = max(0, ended_ns - self._started_ns) / 1e9
        metrics.record(
            instruments.OPERATION_DURATION, duration_s, {**labels, names.ERROR_TYPE: error}
        )
        if (first_chunk_s := self._first_chunk_s) is not None:
            metrics.record(instruments.TIME_TO_FIRST_CHUNK, first_chunk_s, labels)


def _add_parameters(found: dict[str, Any], request: GenerateRequest) -> None:
    """Add a request's parameters, without any text of its client's but a conversation's id."""
    if request.session is not None or request.kv_session is not None:
        conversation = request.session or request.kv_session
        assert conversation is not None
        found[names.CONVERSATION_ID] = conversation.id
    if request.embed is not None:
        return
    sampling = request.sampling
    found[names.MAX_TOKENS] = sampling.max_tokens
    found[names.TEMPERATURE] = float(sampling.temperature)
    found[names.TOP_P] = float(sampling.top_p)
    if sampling.top_k > 0:
        found[names.TOP_K] = float(sampling.top_k)
    if sampling.frequency_penalty:
        found[names.FREQUENCY_PENALTY] = float(sampling.frequency_penalty)
    if sampling.presence_penalty:
        found[names.PRESENCE_PENALTY] = float(sampling.presence_penalty)
    if sampling.seed is not None:
        found[names.SEED] = sampling.seed
    if request.n != 1:
        found[names.CHOICES] = request.n
    if request.stream:
        found[names.STREAM] = True
    constraint = sampling.constraint
    if constraint is not None and (constraint.json_object or constraint.json_schema is not None):
        found[names.OUTPUT_TYPE] = "json"
