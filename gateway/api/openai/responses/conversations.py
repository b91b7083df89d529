"""`/v1/conversations`: items kept by name, which responses continue and add to."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from .....config import RequestError, shown
from ....call import Call
from ....caller import Caller, may_use
from ....server.http import EngineError, FieldError, JsonResponse, Response, read_object
from ....serving.begun_calls import decode_record
from ....serving.durable_calls import CallHead
from ....serving.fields import read_part, read_query
from ....serving.services import Services
from .items import Item, answered, check_calls, items_of, page_of
from .output import Answer
from .requests import ItemsQuery, ResponseRecord, check_metadata

ID_PREFIX = "conv_"

_MOST_TRIES = 32
"""Attempts of a change while others change the same conversation."""

_ENDED_WELL = ("completed", "incomplete")


class _Newest(msgspec.Struct, frozen=True, kw_only=True, tag="conversation"):
    """The stored beginning of a conversation.

    Attributes:
        version: One of the last versions; those after it have names.
        snapshot: The id of the stored snapshot of that version.
    """

    tenant: str
    call: CallHead
    version: int
    snapshot: str


class Conversation(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot"):
    """A conversation in one of its versions.

    Attributes:
        models: The models whose outputs are in it.
        responses: Ids of the responses that are in it.
    """

    tenant: str
    call: CallHead
    metadata: dict[str, str] = {}
    items: list[Item] = []
    models: tuple[str, ...] = ()
    responses: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return self.call.id

    def as_answer(self) -> Answer:
        """Return it in OpenAI's form, without items."""
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.call.created,
            "metadata": self.metadata,
        }


class _At(msgspec.Struct, frozen=True):
    """A conversation where it is stored."""

    newest: _Newest
    conversation: Conversation


class Conversations:
    """The conversations of all tenants, stored beside calls, with the same limits of room and time.

    Each version is a stored snapshot of its own, and takes effect when it claims the version's
    name, which only one can. So no change is lost when several gateways add at once.
    """

    def __init__(self, services: Services) -> None:
        self._calls = services.client.bus.store.calls
        self._most_bytes = services.config.bus.max_request_bytes

    async def create(
        self, tenant: str, metadata: dict[str, str], items: list[Item]
    ) -> Conversation:
        """Raises CallsFull; RequestError: request_too_large."""
        head = CallHead(id=f"{ID_PREFIX}{uuid.uuid4().hex}", created=int(time.time()), model="")
        made = Conversation(tenant=tenant, call=head, metadata=metadata, items=items)
        await self._store_next(None, made)
        return made

    async def find(self, caller: Caller, tenant: str, conversation_id: str) -> Conversation:
        """Return a tenant's conversation, with outputs of models that the caller may use.

        Raises:
            EngineError: unknown_conversation.
        """
        found = (await self._look(tenant, conversation_id)).conversation
        if not all(may_use(caller, model) for model in found.models):
            raise unknown(conversation_id)
        return found

    async def change(
        self,
        tenant: str,
        conversation_id: str,
        change: Callable[[Conversation], Conversation],
    ) -> Conversation:
        """Change a conversation. Other changes may come first, so that `change` is repeated.

        Raises:
            EngineError: unknown_conversation.
            CallsFull: There is no room for it.
            RequestError: request_too_large.
        """
        for _ in range(_MOST_TRIES):
            at = await self._look(tenant, conversation_id)
            changed = change(at.conversation)
            if changed is at.conversation or await self._store_next(at, changed):
                return changed
        raise EngineError(
            "many others change this conversation at once; try again", code="overloaded"
        )

    async def delete(self, tenant: str, conversation_id: str) -> None:
        """Raises EngineError: unknown_conversation."""
        at = await self._look(tenant, conversation_id)
        await self._calls.mark(conversation_id, "cancelled")
        await self._calls.drop(at.newest.snapshot)

    async def _look(self, tenant: str, conversation_id: str) -> _At:
        """Read the last version, which keeps it for as long as any stored call."""
        for _ in range(_MOST_TRIES):
            stored = await self._calls.read(conversation_id)
            newest = decode_record(stored.record, _Newest) if stored is not None else None
            if stored is None or newest is None or newest.tenant != tenant:
                raise unknown(conversation_id)
            if "cancelled" in stored.marks:
                raise unknown(conversation_id)
            while later := await self._calls.named(_name(newest, newest.version + 1)):
                newest = replace(newest, version=newest.version + 1, snapshot=later)
            kept = await self._calls.read(newest.snapshot)
            found = decode_record(kept.record, Conversation) if kept is not None else None
            if found is None:
                continue  # a later version has just replaced it
            names = {conversation_id: "", newest.snapshot: _name(newest, newest.version)}
            await self._calls.attach(names, 0)
            return _At(newest, found)
        raise unknown(conversation_id)

    async def _store_next(self, at: _At | None, changed: Conversation) -> bool:
        """Store the version after another; None: the first. Returns False if there is one."""
        record = msgspec.json.encode(changed)
        if len(record) > self._most_bytes:
            raise FieldError(
                f"the conversation would have {len(record)} bytes, and may have "
                f"{self._most_bytes} (bus.max_request_bytes); delete items of it",
                param=None,
                code="request_too_large",
            )
        version = 1 if at is None else at.newest.version + 1
        snapshot = f"{changed.id}.{uuid.uuid4().hex}"
        newest = _Newest(
            tenant=changed.tenant, call=changed.call, version=version, snapshot=snapshot
        )
        await self._calls.keep(snapshot, record, 0, changed.tenant)
        name = _name(newest, version)
        if await self._calls.claim(name, snapshot) != snapshot:
            await self._calls.drop(snapshot)
            return False
        await self._calls.keep(changed.id, msgspec.json.encode(newest), 0, changed.tenant)
        if at is not None:
            # Its name stays, so that no other change takes effect after it.
            await self._calls.drop(at.newest.snapshot)
        return True

    async def add_response(self, record: ResponseRecord, answer: Answer) -> None:
        """Add the input and the output of an ended response to its conversation, once.

        Raises:
            NanoInferenceError: As `change`, except for a deleted conversation.
        """
        conversation_id = record.call.fields.conversation_id
        if not conversation_id or answer["status"] not in _ENDED_WELL:
            return
        added = [*record.items[record.num_before :], *answered(answer["output"])]

        def joined(before: Conversation) -> Conversation:
            if record.id in before.responses:
                return before
            return replace(
                before,
                items=[*before.items, *added],
                models=tuple(dict.fromkeys((*before.models, record.call.model))),
                responses=(*before.responses, record.id),
            )

        try:
            await self.change(record.tenant, conversation_id, joined)
        except EngineError as error:
            if error.code != unknown("").code:
                raise


def _name(newest: _Newest, version: int) -> str:
    return f"{newest.call.id}/{version}"


def unknown(conversation_id: str) -> EngineError:
    """There is no such conversation, or the caller may not see it."""
    return EngineError(
        f"there is no conversation {shown(conversation_id)} here: it was deleted, is another "
        "tenant's (X-Tenant) or has outputs of a model that the key is not for, or was not used "
        "for longer than results are kept (bus.results_ttl_s); make a new one",
        code="unknown_conversation",
    )


class ConversationBody(msgspec.Struct, frozen=True, kw_only=True):
    """A new conversation."""

    items: list[dict[str, Any]] | None = None
    metadata: dict[str, str] = {}


class MetadataBody(msgspec.Struct, frozen=True, kw_only=True):
    """The new metadata of a conversation."""

    metadata: dict[str, str] = {}


class ItemsBody(msgspec.Struct, frozen=True, kw_only=True):
    """Items for a conversation."""

    items: list[dict[str, Any]]


Resolve = Callable[[Call, list[Item], list[Item]], Awaitable[list[Item]]]
"""Returns items with stored ones in place of references, after others."""


class ConversationCalls:
    """The endpoints."""

    def __init__(self, services: Services, conversations: Conversations, resolve: Resolve) -> None:
        self._config = services.config
        self._conversations = conversations
        self._resolve = resolve

    async def create(self, call: Call) -> Response:
        body = read_part(await self._read(call), ConversationBody)
        check_metadata(body.metadata)
        items = await self._items(call, body.items or [], [])
        made = await self._conversations.create(call.tenant, body.metadata, items)
        return JsonResponse(made.as_answer())

    async def retrieve(self, call: Call) -> Response:
        return JsonResponse((await self._found(call)).as_answer())

    async def update(self, call: Call) -> Response:
        body = read_part(await self._read(call), MetadataBody)
        check_metadata(body.metadata)
        await self._found(call)
        changed = await self._change(call, lambda before: replace(before, metadata=body.metadata))
        return JsonResponse(changed.as_answer())

    async def delete(self, call: Call) -> Response:
        found = await self._found(call)
        await self._conversations.delete(call.tenant, found.id)
        return JsonResponse({"id": found.id, "object": "conversation.deleted", "deleted": True})

    async def items(self, call: Call) -> Response:
        query = read_query(call, ItemsQuery)
        found = await self._found(call)
        return JsonResponse(page_of(found.items, query.order, query.after, query.limit))

    async def add_items(self, call: Call) -> Response:
        body = read_part(await self._read(call), ItemsBody)
        before = (await self._found(call)).items
        added = await self._items(call, body.items, before)
        await self._change(call, lambda before: replace(before, items=[*before.items, *added]))
        return JsonResponse(page_of(added, "asc", None, len(added)))

    async def item(self, call: Call) -> Response:
        found = await self._found(call)
        item_id = call.params["item_id"]
        for item in found.items:
            if item["id"] == item_id:
                return JsonResponse(item)
        raise _no_item(item_id)

    async def delete_item(self, call: Call) -> Response:
        """Delete an item; returns the conversation."""
        await self._found(call)
        item_id = call.params["item_id"]

        def without(before: Conversation) -> Conversation:
            kept = [item for item in before.items if item["id"] != item_id]
            if len(kept) == len(before.items):
                raise _no_item(item_id)
            return replace(before, items=kept)

        return JsonResponse((await self._change(call, without)).as_answer())

    async def _read(self, call: Call) -> dict[str, Any]:
        return await read_object(call, self._config.gateway.max_body_bytes)

    async def _items(
        self, call: Call, given: list[dict[str, Any]], before: list[Item]
    ) -> list[Item]:
        items = await self._resolve(call, before, items_of(given, call.tenant, "items"))
        check_calls([*before, *items], len(before), "items")
        return items

    async def _found(self, call: Call) -> Conversation:
        name = call.params["conversation_id"]
        return await self._conversations.find(call.caller, call.tenant, name)

    async def _change(
        self, call: Call, change: Callable[[Conversation], Conversation]
    ) -> Conversation:
        name = call.params["conversation_id"]
        return await self._conversations.change(call.tenant, name, change)


def _no_item(item_id: str) -> RequestError:
    return EngineError(
        f"there is no item {shown(item_id)} in this conversation",
        code="unknown_item",
        remedy="list its items",
    )
