"""Requests, steps, and a client that reads what the core delivers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
from transformers import PreTrainedTokenizerFast

from nano_inference.bus.control import Cancel
from nano_inference.bus.messages import RequestOpened
from nano_inference.bus.public import Completion, CompletionChunk, Output, StageTime, Usage
from nano_inference.bus.steps import StartedSequence, StepResult
from nano_inference.config import Config, EngineConfig, PipelineConfig
from nano_inference.stages.streaming.core import StreamingCore
from nano_inference.stages.streaming.deliveries import Deliveries

from ...sections import OPENED, RESULT, in_parts

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"

PROMPT = tuple(range(50, 57))

EVERYTHING = Config(
    engine=EngineConfig(
        speculation="auto", reference_model_path="reference", response_cache_bytes=1 << 20
    ),
    pipeline=PipelineConfig(replicas=2),
)
"""With all parts."""


def request_of(request_id: str = "r", **changes: Any) -> RequestOpened:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "entry_id": f"entry-{request_id}",
        "model": "tiny",
        "n": 1,
        "stream": True,
        "stop": (),
        "prompt_token_ids": PROMPT,
        "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01",
        "received_ns": 100,
        "admitted_ns": 110,
    }
    return RequestOpened(**(fields | in_parts(changes, OPENED)))


class Started(NamedTuple):
    """A sequence that a step starts, and its request."""

    request: RequestOpened
    sequence: StartedSequence


def started(seq_id: int, request: RequestOpened, sample_index: int = 0, **changes: Any) -> Started:
    fields: dict[str, Any] = {
        "request_id": request.request_id,
        "entry_id": request.entry_id,
        "num_cached": 0,
        "num_generated": 0,
        "executed_ns": 160,
        "queued": StageTime(stage="fairness", start_ns=110, end_ns=150),
    }
    return Started(request, StartedSequence(seq_id, sample_index, **(fields | changes)))


def step(
    rows: Iterable[tuple[int, int, str]] = (),
    *,
    new: Sequence[Started] = (),
    ended: Sequence[Cancel] = (),
    end_ns: int = 200,
    weight_version: int = 0,
    **more: Any,
) -> StepResult:
    """Rows are (sequence id, token id, finish reason); a row's logprob is minus its token id."""
    rows = list(rows)
    return StepResult(
        1,
        tuple(each.sequence for each in new),
        tuple(row[0] for row in rows),
        tuple(row[1] for row in rows),
        tuple(-float(row[1]) for row in rows),
        tuple(row[2] for row in rows),  # type: ignore[misc]
        tuple(ended),
        weight_version,
        end_ns - 10,
        end_ns,
        **in_parts(more, RESULT),
    )


def cancel_of(request_id: str = "r", **changes: Any) -> Cancel:
    fields = {
        "entry_id": f"entry-{request_id}",
        "status": "cancelled",
        "code": "cancelled",
        "message": "you asked for it",
    }
    return Cancel(request_id, **(fields | changes))


class Client:
    """Reads what is delivered, as a client and as batching would."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast | None) -> None:
        self.core = StreamingCore(tokenizer, config=EVERYTHING)
        self.backend: Any = tokenizer and tokenizer.backend_tokenizer
        self.outputs: list[tuple[str, Output]] = []
        self.halts: list[int] = []
        self.now_ns = 1000
        self._opened: set[str] = set()

    def encode(self, text: str) -> list[int]:
        return list(self.backend.encode(text).ids)

    def read(self, deliveries: Deliveries) -> Deliveries:
        new = [(key, output) for key, outputs in deliveries.outputs.items() for output in outputs]
        completions = [output for _, output in new if isinstance(output, Completion)]
        assert [ended.completion for ended in deliveries.ended] == completions
        self.outputs += new
        self.halts += deliveries.halts
        return deliveries

    def open(self, request: RequestOpened) -> list[Deliveries]:
        self._opened.add(request.entry_id)
        return [self.read(each) for each in self.core.open(request, self.now_ns)]

    def step(
        self,
        *args: Any,
        new: Sequence[Started] = (),
        late: bool = False,
        now_ns: int = 0,
        **kwargs: Any,
    ) -> Deliveries:
        """One step; requests that are new in it were opened before, unless they are `late`."""
        for each in new:
            if not late and each.request.entry_id not in self._opened:
                self.open(each.request)
        self.now_ns = now_ns or self.now_ns + 10
        return self.read(self.core.absorb(step(*args, new=new, **kwargs), self.now_ns))

    def end(self, cancel: Cancel) -> Deliveries:
        self.now_ns += 10
        return self.read(self.core.end(cancel, self.now_ns))

    def say(self, seq_id: int, text: str, last: str = "", **kwargs: Any) -> list[int]:
        """One step per token of the text; `last` is the last one's finish reason."""
        ids = self.encode(text)
        for n, token_id in enumerate(ids):
            self.step([(seq_id, token_id, last if n == len(ids) - 1 else "")], **kwargs)
        return ids

    def chunks(self, request_id: str = "r", sample_index: int | None = 0) -> list[CompletionChunk]:
        """The chunks of one sample; of all for None."""
        return [
            output
            for key, output in self.outputs
            if key == request_id
            and isinstance(output, CompletionChunk)
            and sample_index in (None, output.sample_index)
        ]

    def completions(self, key: str = "r") -> list[Completion]:
        return [output for k, output in self.outputs if k == key and isinstance(output, Completion)]

    def completion(self, key: str = "r") -> Completion:
        (only,) = self.completions(key)
        return only


def tokens_of(usage: Usage) -> Usage:
    """A request's usage without its time and its bill."""
    return msgspec.structs.replace(usage, time=None, billed_ns=None)


def assert_chunks_match(client: Client, completion: Completion) -> None:
    """Check that chunks and completion have the same content, without gap or repetition."""
    for sample in completion.samples:
        chunks = client.chunks(completion.request_id, sample.sample_index)
        assert "".join(chunk.text for chunk in chunks) == sample.text
        assert tuple(i for chunk in chunks for i in chunk.token_ids) == sample.token_ids
        assert tuple(p for chunk in chunks for p in chunk.logprobs) == sample.logprobs
        values = [each for chunk in chunks for each in chunk.support_logprobs or ()]
        assert tuple(values) == (sample.support_logprobs or ())
        offset = 0
        for chunk in chunks:
            assert chunk.token_offset == offset
            offset += len(chunk.token_ids)
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].finish_reason == sample.finish_reason
