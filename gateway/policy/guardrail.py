"""What may be said: the block list, for prompts and answers, and what OPA says of prompts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial

import anyio

from ...bus.public import Completion, GenerateRequest, Output
from ...config import NanoInferenceError, RequestError, cut, shown
from ...config.logger import get_logger
from ..serving.measures import Measures
from ..serving.origin import Origin
from ..serving.words import LazyWords, Words
from .backend import PolicyUnavailable
from .block_list import BlockList
from .held_outputs import HeldOutputs
from .opa import Decision, NoDecision, OpenPolicyAgent
from .store import BlockLists

AT_ONCE = 16
"""Prompts of a call that OPA is asked about at the same time."""

# Characters, or tokens, that are looked through at once; more take a thread.
_SHORT = 4096

Cancel = Callable[[str, str], Awaitable[None]]
"""Has the engine end a request: its id, and its entry's."""


class Guardrail:
    """Refuses prompts, and ends answers before what may not be said."""

    def __init__(
        self,
        block_lists: BlockLists | None,
        agent: OpenPolicyAgent | None,
        words: LazyWords,
        measures: Measures,
        cancel: Cancel,
        model: str,
    ) -> None:
        """`block_lists`: None where nothing is kept in which there could be one. `agent`: None
        where nobody else is asked. `model`: the served model, of requests for no adapter."""
        self._model = model
        self._block_lists = block_lists
        self._agent = agent
        self._words = words
        self._measures = measures
        self._cancel = cancel

    @asynccontextmanager
    async def admit(
        self, origin: Origin, requests: Sequence[GenerateRequest]
    ) -> AsyncIterator[None]:
        block_list = await self._block_list()
        if requests and (block_list or self._agent):
            texts = await self._texts(requests)
            if block_list:
                await self._check_blocked(block_list, texts)
            if self._agent:
                await self._ask(self._agent, origin, requests, texts)
        yield

    async def outputs(
        self,
        origin: Origin,
        request: GenerateRequest,
        outputs: AsyncGenerator[Output, None],
        before: str,
    ) -> AsyncGenerator[Output, None]:
        """What of them may leave. A request that has nothing more to say is ended."""
        async with aclosing(outputs):
            block_list = await self._block_list()
            if not block_list:
                async for output in outputs:
                    yield output
                return
            held = HeldOutputs(request, block_list, await self._words.required(), before)
            blocked, cancelled = 0, False
            async for output in outputs:
                for released in await self._put(held, output):
                    yield released
                if held.blocked > blocked:
                    self._measures.refused("content_filter", held.blocked - blocked)
                    origin.account.code = "content_filter"
                    blocked = held.blocked
                if held.complete and not cancelled and not isinstance(output, Completion):
                    cancelled = True
                    await self._cancel(request.request_id, output.entry_id)

    async def _block_list(self) -> BlockList | None:
        return await self._block_lists.get() if self._block_lists is not None else None

    async def _put(self, held: HeldOutputs, output: Output) -> list[Output]:
        if isinstance(output, Completion):
            size = sum(len(sample.text) for sample in output.samples)
        else:
            size = len(output.text)
        if size <= _SHORT:
            return held.put(output)
        return await self._words.beside(partial(held.put, output))

    async def _texts(self, requests: Sequence[GenerateRequest]) -> list[str]:
        """The prompts, as the model reads them but for special tokens."""
        words = await self._words.required()
        size = sum(len(each.prompt or each.prompt_token_ids or ()) for each in requests)
        texts = partial(_texts_of, requests, words)
        return texts() if size <= _SHORT else await self._words.beside(texts)

    async def _check_blocked(self, block_list: BlockList, texts: Sequence[str]) -> None:
        def any_blocked() -> bool:
            return any(map(block_list.blocks, texts))

        short = sum(map(len, texts)) <= _SHORT
        if any_blocked() if short else await self._words.beside(any_blocked):
            raise self._refused("the prompt has in it what is not taken here; leave it out")

    async def _ask(
        self,
        agent: OpenPolicyAgent,
        origin: Origin,
        requests: Sequence[GenerateRequest],
        texts: Sequence[str],
    ) -> None:
        """Asks about each prompt. The first that is refused ends the others."""
        failure: NanoInferenceError | None = None
        asking = anyio.CapacityLimiter(AT_ONCE)

        async def ask(request: GenerateRequest, text: str) -> None:
            nonlocal failure
            async with asking:
                try:
                    self._obey(await agent.ask(_question(origin, request, text, self._model)))
                except NanoInferenceError as error:
                    failure = failure or error
                except NoDecision as error:
                    failure = failure or self._undecided(error)
            if failure is not None:
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            for request, text in zip(requests, texts, strict=True):
                group.start_soon(ask, request, text)
        if failure is not None:
            raise failure

    def _obey(self, decision: Decision) -> None:
        if not decision.allow:
            because = f": {shown(decision.reason)}" if decision.reason else ""
            raise self._refused(f"the policy of this server does not take the prompt{because}")

    def _undecided(self, error: NoDecision) -> PolicyUnavailable:
        get_logger().warning("opa_has_not_decided", reason=cut(str(error)))
        self._measures.refused("policy_unavailable")
        return PolicyUnavailable(
            "whether this prompt may be taken can't be found out, so it is not; try again"
        )

    def _refused(self, message: str) -> RequestError:
        self._measures.refused("content_filter")
        return RequestError(message, code="content_filter")


def text_of(request: GenerateRequest, words: Words) -> str:
    """A prompt as text."""
    if request.prompt is not None:
        return request.prompt
    # Admission refuses what is no token of the model.
    token_ids = [each for each in request.prompt_token_ids or () if 0 <= each < 2**32]
    return words.text(token_ids, skip_special=True)


def _texts_of(requests: Sequence[GenerateRequest], words: Words) -> list[str]:
    return [text_of(request, words) for request in requests]


def _question(origin: Origin, request: GenerateRequest, text: str, model: str) -> dict[str, object]:
    """What OPA has as `input`."""
    return {
        "key_id": origin.caller.key_id,
        "key_name": origin.caller.name,
        "scopes": sorted(origin.caller.scopes),
        "tenant": origin.tenant,
        "model": request.model or model,
        "requested_model": origin.requested_model or request.model,
        "prompt": text,
        "n": request.n,
        "priority": request.priority,
        "sampling": request.sampling,
    }
