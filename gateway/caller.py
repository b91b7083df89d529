"""The caller of a call, its scopes and limits, and the models that it may use."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import PurePath
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..config import RequestError

Scope = Literal["read", "generate", "weights", "admin"]
"""A caller's permission: "read" models and states; "generate" tokens; "weights": change weights,
cache and pace, which all callers share; "admin": change the policy.
"""

SCOPES: tuple[Scope, ...] = ("read", "generate", "weights", "admin")

Needed = Scope | Literal["nothing"]
"""The scope that an endpoint needs; "nothing" of probes and the like."""

Count = Annotated[int, Meta(ge=1, le=2**53)]


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Limits of use; None for no limit.

    Attributes:
        requests_per_minute: Calls that generate tokens, in any 60 seconds.
        tokens_per_minute: Tokens of their prompts and completions.
        max_in_flight: Calls in flight.
    """

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_in_flight: Count | None = None


class AppliedLimits(msgspec.Struct, frozen=True):
    """Limits, with the name of what they apply to: "key:<id>" or "tenant:<name>"."""

    name: str
    limits: Limits


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """A caller.

    Attributes:
        key_id: The id of its key, or the subject of its token; "" without authentication.
        name: The key's name.
        tenant: The tenant of its requests; "" if the call itself names the tenant.
        scopes: Its permissions.
        max_priority: The highest priority it may request; None for `gateway.max_priority`.
        models: The models it may use; None for all.
        mcp_servers: The MCP servers whose tools it may use, by name or host; None for all.
        limits: The limits of its key and its tenant.
    """

    key_id: str = ""
    name: str = ""
    tenant: str = ""
    scopes: frozenset[Scope] = frozenset()
    max_priority: int | None = None
    models: tuple[str, ...] | None = None
    mcp_servers: tuple[str, ...] | None = None
    limits: tuple[AppliedLimits, ...] = ()


NOBODY = Caller()
"""The caller of endpoints that need no scope."""

ANYBODY = Caller(scopes=frozenset(SCOPES))
"""Every caller of a gateway without keys."""


def may(scopes: Collection[Scope], needed: Needed) -> bool:
    """Return whether scopes suffice for an endpoint. Every scope includes "read"."""
    return needed == "nothing" or needed in scopes or (needed == "read" and bool(scopes))


def may_use(caller: Caller, model: str) -> bool:
    """Return whether a caller may use a model or an adapter."""
    return caller.models is None or model in caller.models


def tenant_seen_by(caller: Caller) -> str | None:
    """Return the only tenant whose use a caller may see; None if it may see all."""
    return None if not caller.key_id or "admin" in caller.scopes else caller.tenant


def shown_path(caller: Caller, path: str) -> str:
    """Return a path of the server as a caller may see it: without the scope "admin" its name."""
    return path if "admin" in caller.scopes else PurePath(path).name


def check_allowed(caller: Caller, model: str) -> None:
    """Raises RequestError `model_not_found` when a caller may not use a model."""
    if not may_use(caller, model):
        raise RequestError(
            f"there is no model {model!r:.80} for this key; /v1/models lists those that there are",
            code="model_not_found",
            remedy="name one of those",
        )
