"""`/v1/sessions`: the token trees of sessions, and training samples of them; docs/token-tree.md."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Literal, TypeVar

import msgspec
from msgspec.structs import replace

from ...bus.public import Completion, GenerateRequest
from ...bus.trees import Turn
from ...config import ModelError
from ...pipeline.token_tree import TokenTree, check_complete, read_tree, unknown_session
from ..call import Account, Call
from ..caller import may_use
from ..policy.guardrail import text_of
from ..server.http import JsonResponse, Response, connected
from ..serving.fields import read_query
from ..serving.services import Services
from .routes import PolicyRoute

T = TypeVar("T")

_MOST_BYTES = 1 << 12
_JSON_LINES = "application/jsonl"


class _SamplesQuery(msgspec.Struct, frozen=True):
    """The query of samples.

    Attributes:
        format: "json": one object; "jsonl": one sample a line.
        partial: Whether to leave lost turns out, instead of an error.
    """

    format: Literal["json", "jsonl"] = "json"
    partial: bool = False


class TokenTreeCalls:
    """The endpoints."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._trees = services.client.bus.store.trees

    def routes(self) -> list[PolicyRoute]:
        """Return the routes."""
        return [
            PolicyRoute("GET /v1/sessions/{session:path}/tree", "generate", self.tree),
            PolicyRoute("GET /v1/sessions/{session:path}/samples", "generate", self.samples),
            PolicyRoute("DELETE /v1/sessions/{session:path}", "generate", self.delete),
        ]

    async def tree(self, call: Call) -> Response:
        """Return the nodes of a session's token tree."""
        tree = await self._found(call)
        nodes = await self._beside(tree, tree.nodes)
        about = {"id": tree.session, "object": "token_tree", "lost": tree.lost}
        return JsonResponse({**about, "nodes": nodes})

    async def samples(self, call: Call) -> Response:
        """Return the training samples of a session."""
        query = read_query(call, _SamplesQuery)
        tree = await self._found(call)
        if not query.partial:
            check_complete(tree)
        found = await self._beside(tree, tree.samples)
        if query.format == "jsonl":
            lines = b"".join(msgspec.json.encode(each) + b"\n" for each in found)
            return Response(lines, media_type=_JSON_LINES)
        return JsonResponse({"object": "list", "data": found})

    async def delete(self, call: Call) -> Response:
        """Delete a session."""
        session = call.params["session"]
        await self._found(call)
        await self._trees.drop(call.tenant, session)
        return JsonResponse({"id": session, "object": "session.deleted", "deleted": True})

    async def _found(self, call: Call) -> TokenTree:
        """Return the tree of a session of the caller's tenant, as its clients have got it.

        Raises:
            RequestError: unknown_session.
        """
        session = call.params["session"]
        await call.read(_MOST_BYTES)  # of no use, but `connected` needs all of it
        async with connected(call.cancelled):
            tree = await read_tree(self._trees, call.tenant, session)
            if not all(may_use(call.caller, each.model) for each in tree.turns):
                raise unknown_session(session)
            if not self._services.chain.filters:
                return tree
            turns = [await self._delivered(call, each) for each in tree.turns]
            return await self._beside(tree, partial(TokenTree, session, turns, tree.lost))

    async def _beside(self, tree: TokenTree, work: Callable[[], T]) -> T:
        """Do the work of a tree, in a thread if it is large."""
        tokens = sum(len(each.prompt) for each in tree.turns)
        return await self._services.tokenizer.process(tokens, work)

    async def _delivered(self, call: Call, turn: Turn) -> Turn:
        """Return a turn without the tokens that the guardrail keeps from clients."""
        before = GenerateRequest(prompt_token_ids=turn.prompt, n=len(turn.samples))
        try:
            tokenizer = await self._services.tokenizer.get()
            text = await self._services.tokenizer.process(
                len(turn.prompt), partial(text_of, before, tokenizer)
            )
        except ModelError:
            text = ""
        # What is filtered again counts nowhere.
        apart = copy(call)
        apart.account = Account()
        end = Completion(
            request_id=turn.request_id, entry_id="", status="done", samples=turn.samples
        )
        filtered = await self._services.submissions.filtered_end(apart, before, end, text)
        assert isinstance(filtered, Completion), "a terminal message stays one"
        return replace(turn, samples=filtered.samples)
