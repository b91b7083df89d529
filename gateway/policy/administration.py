"""What administrators do to a policy, be it over HTTP or at the backend itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ...config import RequestError
from ..server.http import convert
from .block_lists import block_list_of
from .document import (
    ApiKey,
    Guardrails,
    Limits,
    ModelName,
    Name,
    PolicyDocument,
    Priority,
    TenantPolicy,
)
from .keys import new_key
from .scopes import Scope
from .store import PolicyStore

Seconds = Annotated[float, Meta(gt=0, le=100 * 366 * 86_400)]
Scopes = Annotated[tuple[Scope, ...], Meta(min_length=1)]
Models = Annotated[tuple[ModelName, ...], Meta(max_length=1000)]

Shown = dict[str, Any]
"""As JSON shows it."""


class KeyWish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key that somebody wants.

    Attributes:
        name: What people call it.
        tenant: Whose requests are made with it; its name, when it says nothing.
        expires_in_s: It ends so long after now; None for never.

    The others are as in `ApiKey`.
    """

    name: Name
    scopes: Scopes = ("generate",)
    tenant: Name | None = None
    max_priority: Priority | None = None
    models: Models | None = None
    limits: Limits = Limits()
    expires_in_s: Seconds | None = None


class KeyChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is to be different of a key; what is not given stays."""

    name: Name | UnsetType = UNSET
    scopes: Scopes | UnsetType = UNSET
    tenant: Name | UnsetType = UNSET
    max_priority: Priority | UnsetType | None = UNSET
    models: Models | UnsetType | None = UNSET
    limits: Limits | UnsetType = UNSET
    expires_in_s: Seconds | UnsetType | None = UNSET


Changed = Callable[[str, str, Shown], None]
"""Told of a change that was made: what was done, to what, and how it is now. No key is in it."""


class Administration:
    """Each change is whole or not at all. Raises RequestError of what is malformed or unknown, and
    PolicyUnavailable when the backend can't be reached."""

    def __init__(self, store: PolicyStore, changed: Changed = lambda what, of, now: None) -> None:
        self._store = store
        self._changed = changed

    async def keys(self) -> list[Shown]:
        """All keys, oldest first, without what would let anybody use them."""
        keys = (await self._read()).keys.values()
        return [_shown_key(key) for key in sorted(keys, key=lambda key: key.created_ns)]

    async def key(self, key_id: str) -> Shown:
        return _shown_key((await self._read()).key(key_id))

    async def create_key(self, body: Shown) -> Shown:
        """A new key, which is shown here and never again."""
        wish = convert(body, KeyWish)
        key, text = new_key(
            ApiKey(
                id="",
                name=_printable(wish.name, "name"),
                digest="",
                tenant=_printable(wish.tenant or wish.name, "tenant"),
                scopes=wish.scopes,
                created_ns=0,
                max_priority=wish.max_priority,
                models=wish.models,
                limits=wish.limits,
                expires_ns=_expiry(wish.expires_in_s),
            )
        )
        await self._store.change(lambda document: document.with_key(key))
        self._changed("create_key", key.id, _shown_key(key))
        return {**_shown_key(key), "key": text}

    async def change_key(self, key_id: str, body: Shown) -> Shown:
        change = convert(body, KeyChange)
        given = {
            name: value
            for name in change.__struct_fields__
            if (value := getattr(change, name)) is not UNSET
        }
        for name in given.keys() & {"name", "tenant"}:
            _printable(given[name], name)
        if "expires_in_s" in given:
            given["expires_ns"] = _expiry(given.pop("expires_in_s"))

        def edit(document: PolicyDocument) -> PolicyDocument:
            return document.with_key(msgspec.structs.replace(document.key(key_id), **given))

        shown = _shown_key((await self._store.change(edit)).key(key_id))
        self._changed("change_key", key_id, shown)
        return shown

    async def revoke_key(self, key_id: str) -> None:
        """It is taken no more: by this gateway at once, by others within `policy.refresh_s`."""
        await self._store.change(lambda document: document.without_key(key_id))
        self._changed("revoke_key", key_id, {})

    async def tenants(self) -> dict[str, Shown]:
        """What is set for tenants, by their names."""
        tenants = (await self._read()).tenants
        return {name: _builtins(each) for name, each in sorted(tenants.items())}

    async def set_tenant(self, tenant: str, body: Shown) -> Shown:
        """Puts what holds for a tenant in the place of what did."""
        policy = convert(body, TenantPolicy)
        name = convert(_printable(tenant, "the tenant's name"), Name, "the tenant's name")
        await self._store.change(lambda document: document.with_tenant(name, policy))
        self._changed("set_tenant", name, _builtins(policy))
        return _builtins(policy)

    async def remove_tenant(self, tenant: str) -> None:
        await self._store.change(lambda document: document.without_tenant(tenant))
        self._changed("remove_tenant", tenant, {})

    async def guardrails(self) -> Shown:
        return _builtins((await self._read()).guardrails)

    async def set_guardrails(self, body: Shown) -> Shown:
        """Puts what may not be said in the place of what might not."""
        guardrails = convert(body, Guardrails)
        # What can't be read is refused here, and not when somebody asks for something.
        await block_list_of(guardrails, max_match=1)

        def edit(document: PolicyDocument) -> PolicyDocument:
            return msgspec.structs.replace(document, guardrails=guardrails)

        await self._store.change(edit)
        self._changed("set_guardrails", "guardrails", _builtins(guardrails))
        return _builtins(guardrails)

    async def _read(self) -> PolicyDocument:
        await self._store.refresh()
        return await self._store.document()


def _shown_key(key: ApiKey) -> Shown:
    shown = _builtins(key)
    del shown["digest"]
    expired = key.expires_ns is not None and key.expires_ns <= time.time_ns()
    return shown | {"expired": expired}


def _builtins(struct: msgspec.Struct) -> Shown:
    """A struct as JSON has it, what is at its default included."""
    shown: Shown = {
        name: value if not isinstance(value, msgspec.Struct) else _builtins(value)
        for name, value in msgspec.structs.asdict(struct).items()
    }
    return shown


def _expiry(in_s: float | None) -> int | None:
    return None if in_s is None else time.time_ns() + int(in_s * 1e9)


def _printable(text: str, what: str) -> str:
    if not text.isprintable():
        raise RequestError(
            f"{what} has characters that can't be printed; leave them out", code="invalid_request"
        )
    return text
