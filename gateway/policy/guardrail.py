"""Guardrails: the block list for prompts and answers, and an Open Policy Agent for prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import httpx2
import msgspec

from ...bus.public import Completion, GenerateRequest, Output
from ...config import PolicyConfig, RequestError, cut, shown
from ...config.logger import get_logger
from ..call import Call
from ..server.http import task_group
from ..server.measures import Measures
from ..serving.chain import Outputs, Requests
from ..serving.tokenizer import LazyTokenizer, Tokenizer
from .backend import PolicyUnavailable
from .block_list import BlockList
from .held_outputs import HeldOutputs
from .store import BlockLists

MOST_BYTES = 64 << 10
"""Bytes of an answer."""


class Decision(msgspec.Struct, frozen=True):
    """A decision. `reason`: the agent's own words for a refusal; "" if it gives none."""

    allow: bool
    reason: str = ""


class _OpaResult(msgspec.Struct, frozen=True):
    result: bool | Decision


class NoDecision(Exception):
    """The agent has not decided. The message says why."""


class OpenPolicyAgent:
    """Asks an agent over its REST API (`POST /v1/data/<policy>`).

    The answer is `{"result": true}`, or `{"result": {"allow": false, "reason": "…"}}`. Any other
    answer, or none in time, is no decision: an undefined policy answers `{}`.
    """

    def __init__(self, config: PolicyConfig, transport: httpx2.AsyncBaseTransport | None = None):
        """`transport`: None for the network."""
        self._url = config.opa_url
        self._timeout_s = config.opa_timeout_s
        # Prompts go neither to a proxy of the environment nor to a redirect's target.
        self._http = httpx2.AsyncClient(
            timeout=config.opa_timeout_s,
            follow_redirects=False,
            trust_env=False,
            transport=transport,
        )

    async def ask(self, about: dict[str, Any]) -> Decision:
        """Return the decision about a call.

        Args:
            about: The policy's `input`.

        Raises:
            NoDecision: The agent can't be reached, is too slow, or its answer is malformed.
        """
        body = msgspec.json.encode({"input": about})
        headers = {"Content-Type": "application/json"}
        answer = b""
        try:
            with anyio.fail_after(self._timeout_s):
                asked = self._http.stream("POST", self._url, content=body, headers=headers)
                async with asked as response:
                    if response.status_code != 200:
                        raise NoDecision(f"status {response.status_code}")
                    async for piece in response.aiter_raw():
                        answer += piece
                        if len(answer) > MOST_BYTES:
                            raise NoDecision(f"an answer of more than {MOST_BYTES} bytes")
        except TimeoutError:
            raise NoDecision(f"no answer within {self._timeout_s} s") from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise NoDecision(shown(f"{type(error).__name__}: {error}")) from None
        try:
            result = msgspec.json.decode(answer, type=_OpaResult).result
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise NoDecision('an answer without {"result": true} or {"allow": …} in it') from None
        return result if isinstance(result, Decision) else Decision(result)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()


AT_ONCE = 16
"""Prompts of a call that the agent checks concurrently."""

Cancel = Callable[[str, str], Awaitable[None]]
"""Cancels a request in the engine: its id, and its entry's."""


@dataclass(eq=False)
class Guardrail:
    """Refuses prompts, and ends answers before blocked text.

    Attributes:
        block_lists: None without a policy backend.
        agent: None without one.
        model: The served model, of requests without an adapter.
    """

    block_lists: BlockLists | None
    agent: OpenPolicyAgent | None
    tokenizer: LazyTokenizer
    measures: Measures
    cancel: Cancel
    model: str

    @asynccontextmanager
    async def admit(self, call: Call, requests: Requests) -> AsyncIterator[None]:
        block_list = await self._block_list()
        if requests and (block_list or self.agent):
            if any(request.fork is not None for request in requests):
                raise self._refused(
                    "a fork's prompt is not known here, so that it can't be checked; send the "
                    "tokens as a prompt"
                )
            texts = await self._texts(requests)
            if block_list:
                blocked = partial(any, map(block_list.blocks, texts))
                if await self.tokenizer.process(sum(map(len, texts)), blocked):
                    raise self._refused("the prompt has in it what is not taken here; leave it out")
            if self.agent:
                await self._ask(self.agent, call, requests, texts)
        yield

    async def outputs(
        self, call: Call, request: GenerateRequest, outputs: Outputs, before: str
    ) -> Outputs:
        """Yield the outputs that may leave. Cancels a request of which nothing more may leave."""
        async with aclosing(outputs):
            block_list = await self._block_list()
            if not block_list:
                async for output in outputs:
                    yield output
                return
            held = HeldOutputs(request, block_list, await self.tokenizer.required(), before)
            blocked, cancelled = 0, False
            async for output in outputs:
                for released in await self._put(held, output):
                    yield released
                if held.blocked > blocked:
                    self.measures.refused("content_filter", held.blocked - blocked)
                    call.account.code = "content_filter"
                    blocked = held.blocked
                if held.complete and not cancelled and not isinstance(output, Completion):
                    cancelled = True
                    await self.cancel(request.request_id, output.entry_id)

    async def _block_list(self) -> BlockList | None:
        return await self.block_lists.get() if self.block_lists is not None else None

    async def _put(self, held: HeldOutputs, output: Output) -> list[Output]:
        if isinstance(output, Completion):
            size = sum(len(sample.text) for sample in output.samples)
        else:
            size = len(output.text)
        return await self.tokenizer.process(size, partial(held.put, output))

    async def _texts(self, requests: Requests) -> list[str]:
        """Return the prompts as the model reads them, without special tokens."""
        tokenizer = await self.tokenizer.required()
        size = sum(len(each.prompt or each.prompt_token_ids or ()) for each in requests)
        return await self.tokenizer.process(
            size, lambda: [text_of(each, tokenizer) for each in requests]
        )

    async def _ask(
        self, agent: OpenPolicyAgent, call: Call, requests: Requests, texts: Sequence[str]
    ) -> None:
        """Ask the agent about each prompt. The first refusal cancels the other questions."""
        asking = anyio.CapacityLimiter(AT_ONCE)

        async def ask(request: GenerateRequest, text: str) -> None:
            async with asking:
                try:
                    decision = await agent.ask(self._question(call, request, text))
                except NoDecision as error:
                    get_logger().warning("opa_has_not_decided", reason=cut(str(error)))
                    self.measures.refused("policy_unavailable")
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

    def _question(self, call: Call, request: GenerateRequest, text: str) -> dict[str, object]:
        """Return the agent's `input`."""
        return {
            "key_id": call.caller.key_id,
            "key_name": call.caller.name,
            "scopes": sorted(call.caller.scopes),
            "tenant": call.tenant,
            "model": request.model or self.model,
            "requested_model": call.requested_model or request.model,
            "prompt": text,
            "n": request.n,
            "priority": request.priority,
            "sampling": request.sampling,
        }

    def _refused(self, message: str) -> RequestError:
        self.measures.refused("content_filter")
        return RequestError(message, code="content_filter")


def text_of(request: GenerateRequest, tokenizer: Tokenizer) -> str:
    """Return a prompt as text."""
    if request.prompt is not None:
        return request.prompt
    if request.messages is not None:
        return "\n".join(each.text for each in request.messages)
    # Admission refuses ids that are no tokens of the model.
    token_ids = [each for each in request.prompt_token_ids or () if 0 <= each < 2**32]
    return tokenizer.text(token_ids, skip_special=True)
