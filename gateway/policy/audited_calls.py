"""What the audit log is told of calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from ...bus.public import Completion, GenerateRequest, Output
from ...config import ModelError, NanoInferenceError
from ..serving.measures import Measures
from ..serving.origin import Origin
from ..serving.words import LazyWords, Words
from .audit import AuditLog
from .backend import PolicyUnavailable
from .chain import PolicyCall
from .guardrail import text_of


class AuditedHeads:
    """Where the settings say so, refuses calls of which the log could not tell."""

    def __init__(self, log: AuditLog, measures: Measures) -> None:
        self._log = log
        self._measures = measures

    async def check(self, call: PolicyCall) -> None:
        if self._log.refuses:
            self._measures.refused("policy_unavailable")
            raise PolicyUnavailable(
                "the audit log can't be written, so nothing is done that would stand there; try "
                "again when it can"
            )


class AuditedCalls(AuditedHeads):
    """Notes what the requests of each call ask and are answered, as it leaves."""

    def __init__(
        self, log: AuditLog, words: LazyWords, measures: Measures, default_model: str
    ) -> None:
        """`default_model`: that of requests that name none."""
        super().__init__(log, measures)
        self._words = words
        self._default_model = default_model

    @asynccontextmanager
    async def admit(
        self, origin: Origin, requests: Sequence[GenerateRequest]
    ) -> AsyncIterator[None]:
        account = origin.account
        if requests:
            words = await self._loaded()
            # Some interfaces call by their own names what asks the same engine.
            account.model = account.model or requests[0].model or self._default_model
            _Prompts.of(origin).add(requests, words)
        try:
            yield
        except NanoInferenceError as error:
            account.code = error.code
            raise
        finally:
            if account.background:
                self._tell_background(origin)

    async def outputs(
        self,
        origin: Origin,
        request: GenerateRequest,
        outputs: AsyncGenerator[Output, None],
        before: str,
    ) -> AsyncGenerator[Output, None]:
        """All of them; what a client has had when it goes is told, too."""
        answer = _Answer.of(origin).begin(request.request_id)
        async with aclosing(outputs):
            async for output in outputs:
                if isinstance(output, Completion):
                    answer.update({each.sample_index: [each.text] for each in output.samples})
                else:
                    answer.setdefault(output.sample_index, []).append(output.text)
                yield output

    def _tell_background(self, origin: Origin) -> None:
        """A line of requests that ended, or were left to another gateway, with no call around."""
        caller, account = origin.caller, origin.account
        told = {
            "request_ids": _Answer.of(origin).request_ids,
            **origin.trace.log_ids,
            "key_id": caller.key_id,
            "key_name": caller.name,
            "tenant": origin.tenant,
            "model": account.model,
            "code": account.code,
            "prompt_tokens": account.prompt_tokens,
            "completion_tokens": account.completion_tokens,
        }
        self._log.write("background", told, account.texts)

    async def _loaded(self) -> Words | None:
        try:
            return await self._words.get()
        except ModelError:
            return None


class _Prompts:
    """The prompts of a call, which may make more requests of the answers to others."""

    def __init__(self) -> None:
        self._requests: list[GenerateRequest] = []
        self._words: Words | None = None

    @classmethod
    def of(cls, origin: Origin) -> _Prompts:
        """Those of a call, which are noted there."""
        found = origin.account.texts.get("prompt")
        if not isinstance(found, cls):
            found = origin.account.texts["prompt"] = cls()
        return found

    def add(self, requests: Sequence[GenerateRequest], words: Words | None) -> None:
        """Some more."""
        self._requests += requests
        self._words = words

    def __call__(self) -> list[str]:
        return [_prompt_of(each, self._words) for each in self._requests]


class _Answer:
    """The answer to a call: the texts of all samples, in the order in which its requests began."""

    def __init__(self) -> None:
        self._pieces: dict[str, dict[int, list[str]]] = {}

    @classmethod
    def of(cls, origin: Origin) -> _Answer:
        """That of a call, which is noted there."""
        found = origin.account.texts.get("answer")
        if not isinstance(found, cls):
            found = origin.account.texts["answer"] = cls()
        return found

    def begin(self, request_id: str) -> dict[int, list[str]]:
        """The pieces of a request's samples, by their index."""
        return self._pieces.setdefault(request_id, {})

    @property
    def request_ids(self) -> list[str]:
        """Of those that began."""
        return list(self._pieces)

    def __call__(self) -> list[str]:
        return [
            "".join(pieces)
            for samples in self._pieces.values()
            for _, pieces in sorted(samples.items())
        ]


def _prompt_of(request: GenerateRequest, words: Words | None) -> str:
    """As text; without the tokenizer as the tokens' ids."""
    if words is not None:
        return text_of(request, words)
    return request.prompt or " ".join(map(str, request.prompt_token_ids or ()))
