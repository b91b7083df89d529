"""Changes to a policy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ...config import RequestError
from ..caller import Limits, Scope
from ..server.http import convert
from .document import (
    ApiKey,
    Guardrails,
    ModelName,
    Name,
    PolicyDocument,
    Priority,
    TenantPolicy,
)
from .keys import new_key
from .store import PolicyStore, block_list_of

Seconds = Annotated[float, Meta(gt=0, le=100 * 366 * 86_400)]
Scopes = Annotated[tuple[Scope, ...], Meta(min_length=1)]
Names = Annotated[tuple[ModelName, ...], Meta(max_length=1000)]

Shown = dict[str, Any]
"""A value as JSON shows it."""


class _KeyFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields as in `ApiKey`.

    Attributes:
        expires_in_s: Seconds until the key expires; None for never.
    """

    name: Name | UnsetType = UNSET
    scopes: Scopes | UnsetType = UNSET
    max_priority: Priority | UnsetType | None = UNSET
    models: Names | UnsetType | None = UNSET
    mcp_servers: Names | UnsetType | None = UNSET
    limits: Limits | UnsetType = UNSET
    expires_in_s: Seconds | UnsetType | None = UNSET

    def given(self) -> Shown:
        """Return the given fields as those of an `ApiKey`. Raises RequestError."""
        fields = {
            name: value
            for name, value in msgspec.structs.asdict(self).items()
            if value is not UNSET
        }
        for name in ("name", "tenant"):
            _printable(fields.get(name) or "", name)
        if "expires_in_s" in fields:
            in_s = fields.pop("expires_in_s")
            fields["expires_ns"] = None if in_s is None else time.time_ns() + int(in_s * 1e9)
        return fields


class KeyWish(_KeyFields, frozen=True, kw_only=True):
    """A new key. Its tenant is its name if none is given."""

    name: Name
    scopes: Scopes = ("generate",)
    tenant: Name | UnsetType | None = UNSET


class KeyChange(_KeyFields, frozen=True, kw_only=True):
    """A change to a key; a field that is not given stays."""

    tenant: Name | UnsetType = UNSET


Changed = Callable[[str, str, Shown], None]
"""Called after a change with the event's name, the changed object's id, and its new value, which
never contains a key."""


class Administration:
    """Atomic changes to a policy.

    Methods raise RequestError for malformed input or unknown ids, and PolicyUnavailable when the
    backend can't be reached.
    """

    def __init__(self, store: PolicyStore, changed: Changed = lambda what, of, now: None) -> None:
        self._store = store
        self._changed = changed

    async def keys(self) -> list[Shown]:
        """Return all keys, oldest first, without their digests."""
        keys = (await self._read()).keys.values()
        return [_shown_key(key) for key in sorted(keys, key=lambda key: key.created_ns)]

    async def key(self, key_id: str) -> Shown:
        return _shown_key((await self._read()).key(key_id))

    async def create_key(self, body: Shown) -> Shown:
        """Create a key. Only this answer contains the key itself."""
        given = convert(body, KeyWish).given()
        key, text = new_key(**given | {"tenant": given.get("tenant") or given["name"]})
        await self._store.change(lambda document: document.with_key(key))
        self._changed("create_key", key.id, _shown_key(key))
        return {**_shown_key(key), "key": text}

    async def change_key(self, key_id: str, body: Shown) -> Shown:
        given = convert(body, KeyChange).given()

        def edit(document: PolicyDocument) -> PolicyDocument:
            return document.with_key(msgspec.structs.replace(document.key(key_id), **given))

        shown = _shown_key((await self._store.change(edit)).key(key_id))
        self._changed("change_key", key_id, shown)
        return shown

    async def revoke_key(self, key_id: str) -> None:
        """Revoke a key, here at once and at other gateways within `policy.refresh_s`."""
        await self._store.change(lambda document: document.without_key(key_id))
        self._changed("revoke_key", key_id, {})

    async def tenants(self) -> dict[str, Shown]:
        """Return the settings of tenants, by name."""
        tenants = (await self._read()).tenants
        return {name: _builtins(each) for name, each in sorted(tenants.items())}

    async def set_tenant(self, tenant: str, body: Shown) -> Shown:
        """Replace a tenant's settings."""
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
        """Replace the block list."""
        guardrails = convert(body, Guardrails)
        # Refuse an invalid pattern here, not at the next request.
        await block_list_of(guardrails, max_match=1)
        await self._store.change(
            lambda document: msgspec.structs.replace(document, guardrails=guardrails)
        )
        self._changed("set_guardrails", "guardrails", _builtins(guardrails))
        return _builtins(guardrails)

    async def _read(self) -> PolicyDocument:
        await self._store.refresh()
        return await self._store.document()


ROUTES = {
    "keys": "GET /admin/keys",
    "create_key": "POST /admin/keys",
    "key": "GET /admin/keys/{key_id}",
    "change_key": "PATCH /admin/keys/{key_id}",
    "revoke_key": "DELETE /admin/keys/{key_id}",
    "tenants": "GET /admin/tenants",
    "set_tenant": "PUT /admin/tenants/{tenant:path}",
    "remove_tenant": "DELETE /admin/tenants/{tenant:path}",
    "guardrails": "GET /admin/guardrails",
    "set_guardrails": "PUT /admin/guardrails",
}
"""The route of each method, which takes the path's parameter, then the body if there is one."""


def _shown_key(key: ApiKey) -> Shown:
    shown = _builtins(key)
    del shown["digest"]
    expired = key.expires_ns is not None and key.expires_ns <= time.time_ns()
    return shown | {"expired": expired}


def _builtins(struct: msgspec.Struct) -> Shown:
    """Return a struct as JSON shows it, with the fields at their defaults."""
    return {
        name: value if not isinstance(value, msgspec.Struct) else _builtins(value)
        for name, value in msgspec.structs.asdict(struct).items()
    }


def _printable(text: str, what: str) -> str:
    if not text.isprintable():
        raise RequestError(
            f"{what} has characters that can't be printed; leave them out", code="invalid_request"
        )
    return text
