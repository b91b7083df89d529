"""Recording of calls for the audit log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

from msgspec.structs import replace

from ...bus.codec import encode_output
from ...bus.public import Completion, GenerateRequest
from ...config import ModelError, NanoInferenceError
from ..call import Account, Call
from ..server.measures import Measures
from ..serving.chain import Outputs, Requests
from ..serving.tokenizer import LazyTokenizer, Tokenizer
from .audit import AuditLog
from .backend import PolicyUnavailable
from .guardrail import text_of


class AuditedHeads:
    """Refuses calls that the log can't record, if the settings say so."""

    def __init__(self, log: AuditLog, measures: Measures) -> None:
        self._log = log
        self._measures = measures

    async def check(self, call: Call) -> None:
        if self._log.refuses:
            self._measures.refused("policy_unavailable")
            raise PolicyUnavailable(
                "the audit log can't be written, so nothing is done that would stand there; try "
                "again when it can"
            )


class AuditedCalls(AuditedHeads):
    """Records the prompts of each call, and its answer as it leaves."""

    def __init__(
        self, log: AuditLog, tokenizer: LazyTokenizer, measures: Measures, default_model: str
    ) -> None:
        """`default_model`: the model of requests that name none."""
        super().__init__(log, measures)
        self._tokenizer = tokenizer
        self._default_model = default_model

    @asynccontextmanager
    async def admit(self, call: Call, requests: Requests) -> AsyncIterator[None]:
        account = call.account
        if requests:
            try:
                tokenizer = await self._tokenizer.get()
            except ModelError:
                tokenizer = None
            # Some interfaces have names of their own for the same engine.
            account.model = account.model or requests[0].model or self._default_model
            _recorded(account, "prompt", _RecordedPrompts).add(requests, tokenizer)
        try:
            yield
        except NanoInferenceError as error:
            account.code = error.code
            raise
        finally:
            if account.background:
                self._write_background(call)

    async def outputs(
        self, call: Call, request: GenerateRequest, outputs: Outputs, before: str
    ) -> Outputs:
        """Yield all outputs. What a client received before it disconnects is recorded, too."""
        recorded = _recorded(call.account, "answer", _RecordedAnswer)
        answer = recorded.pieces.setdefault(request.request_id, {})
        ended = None
        if self._log.shows_text:
            ended = _recorded(call.account, "recorded", _RecordedEnds).completions
        async with aclosing(outputs):
            async for output in outputs:
                if isinstance(output, Completion):
                    answer.update({each.sample_index: [each.text] for each in output.samples})
                    if ended is not None:
                        ended.append(output)
                else:
                    answer.setdefault(output.sample_index, []).append(output.text)
                yield output

    def _write_background(self, call: Call) -> None:
        """Write a line about requests that ended, or went to another gateway, outside a call."""
        caller, account = call.caller, call.account
        fields = {
            "request_ids": list(_recorded(account, "answer", _RecordedAnswer).pieces),
            **call.trace.log_ids,
            "key_id": caller.key_id,
            "key_name": caller.name,
            "tenant": call.tenant,
            "model": account.model,
            "code": account.code,
            **account.usage,
        }
        self._log.write("background", fields, account.texts)


R = TypeVar("R", bound="_RecordedPrompts | _RecordedAnswer | _RecordedEnds")


def _recorded(account: Account, name: str, kind: type[R]) -> R:
    """Return what is recorded in a call's account under a name."""
    found = account.texts.setdefault(name, kind())
    assert isinstance(found, kind)
    return found


class _RecordedPrompts:
    """The prompts of a call; it may make more requests of the answers to earlier ones."""

    def __init__(self) -> None:
        self._requests: list[GenerateRequest] = []
        self._tokenizer: Tokenizer | None = None

    def add(self, requests: Requests, tokenizer: Tokenizer | None) -> None:
        self._requests += requests
        self._tokenizer = tokenizer

    def __call__(self) -> list[str]:
        """Return the texts; without a tokenizer, the ids of the tokens."""
        if self._tokenizer is not None:
            return [text_of(each, self._tokenizer) for each in self._requests]
        return [
            each.prompt or " ".join(map(str, each.prompt_token_ids or ()))
            for each in self._requests
        ]


class _RecordedAnswer:
    """The answer to a call. `pieces`: texts by request, in the order in which requests began, and
    by sample."""

    def __init__(self) -> None:
        self.pieces: dict[str, dict[int, list[str]]] = {}

    def __call__(self) -> list[str]:
        return [
            "".join(pieces)
            for samples in self.pieces.values()
            for _, pieces in sorted(samples.items())
        ]


class _RecordedEnds:
    """The requests' terminal messages, for `replay`."""

    def __init__(self) -> None:
        self.completions: list[Completion] = []

    def __call__(self) -> list[str]:
        """Return them as JSON, without texts, which the line has already."""
        return [encode_output(_without_texts(each)).decode() for each in self.completions]


def _without_texts(completion: Completion) -> Completion:
    return replace(completion, samples=tuple(replace(each, text="") for each in completion.samples))
