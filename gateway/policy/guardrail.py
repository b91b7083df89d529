"""Guardrails: the block list for prompts and answers, and an Open Policy Agent for prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial

import anyio

from ...bus.public import Completion, GenerateRequest, Output
from ...config import RequestError, cut, shown
from ...config.logger import get_logger
from ..server.http import task_group
from ..serving.measures import Measures
from ..serving.origin import Origin
from ..serving.words import LazyWords, Words
from .backend import PolicyUnavailable
from .block_list import BlockList
from .chain import Outputs, Requests
from .held_outputs import HeldOutputs
from .opa import NoDecision, OpenPolicyAgent
from .store import BlockLists

AT_ONCE = 16
"""Prompts of a call that the agent is asked about concurrently."""

# Characters, or tokens, that are scanned on the event loop; more take a thread.
_SHORT = 4096

Cancel = Callable[[str, str], Awaitable[None]]
"""Cancels a request in the engine: its id, and its entry's."""


class Guardrail:
    """Refuses prompts, and ends answers before blocked text."""

    def __init__(
        self,
        block_lists: BlockLists | None,
        agent: OpenPolicyAgent | None,
        words: LazyWords,
        measures: Measures,
        cancel: Cancel,
        model: str,
    ) -> None:
        """`block_lists`: None without a policy backend. `agent`: None without one. `model`: the
        served model, of requests without an adapter."""
        self._model = model
        self._block_lists = block_lists
        self._agent = agent
        self._words = words
        self._measures = measures
        self._cancel = cancel

    @asynccontextmanager
    async def admit(self, origin: Origin, requests: Requests) -> AsyncIterator[None]:
        block_list = await self._block_list()
        if requests and (block_list or self._agent):
            texts = await self._texts(requests)
            if block_list:
                blocked = partial(any, map(block_list.blocks, texts))
                short = sum(map(len, texts)) <= _SHORT
                if blocked() if short else await self._words.beside(blocked):
                    raise self._refused("the prompt has in it what is not taken here; leave it out")
            if self._agent:
                await self._ask(self._agent, origin, requests, texts)
        yield

    async def outputs(
        self, origin: Origin, request: GenerateRequest, outputs: Outputs, before: str
    ) -> Outputs:
        """Yield the outputs that may leave. Cancels a request of which nothing more may leave."""
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

    async def _texts(self, requests: Requests) -> list[str]:
        """Return the prompts as the model reads them, without special tokens."""
        words = await self._words.required()
        size = sum(len(each.prompt or each.prompt_token_ids or ()) for each in requests)

        def texts() -> list[str]:
            return [text_of(request, words) for request in requests]

        return texts() if size <= _SHORT else await self._words.beside(texts)

    async def _ask(
        self, agent: OpenPolicyAgent, origin: Origin, requests: Requests, texts: Sequence[str]
    ) -> None:
        """Ask the agent about each prompt. The first refusal cancels the other questions."""
        asking = anyio.CapacityLimiter(AT_ONCE)

        async def ask(request: GenerateRequest, text: str) -> None:
            async with asking:
                try:
                    decision = await agent.ask(self._question(origin, request, text))
                except NoDecision as error:
                    get_logger().warning("opa_has_not_decided", reason=cut(str(error)))
                    self._measures.refused("policy_unavailable")
                    raise PolicyUnavailable(
                        "whether this prompt may be taken can't be found out, so it is not; try "
                        "again"
                    ) from None
            if not decision.allow:
                because = f": {shown(decision.reason)}" if decision.reason else ""
                raise self._refused(f"the policy of this server does not take the prompt{because}")

        async with task_group() as group:
            for request, text in zip(requests, texts, strict=True):
                group.start_soon(ask, request, text)

    def _question(self, origin: Origin, request: GenerateRequest, text: str) -> dict[str, object]:
        """Return the agent's `input`."""
        return {
            "key_id": origin.caller.key_id,
            "key_name": origin.caller.name,
            "scopes": sorted(origin.caller.scopes),
            "tenant": origin.tenant,
            "model": request.model or self._model,
            "requested_model": origin.requested_model or request.model,
            "prompt": text,
            "n": request.n,
            "priority": request.priority,
            "sampling": request.sampling,
        }

    def _refused(self, message: str) -> RequestError:
        self._measures.refused("content_filter")
        return RequestError(message, code="content_filter")


def text_of(request: GenerateRequest, words: Words) -> str:
    """Return a prompt as text."""
    if request.prompt is not None:
        return request.prompt
    # Admission refuses ids that are no tokens of the model.
    token_ids = [each for each in request.prompt_token_ids or () if 0 <= each < 2**32]
    return words.text(token_ids, skip_special=True)
