"""The caller of a call, and the models that it may use."""

from __future__ import annotations

from pathlib import PurePath

import msgspec
from starlette.requests import Request

from ...config import RequestError
from .document import SCOPES, Limits, Scope

CALLER = "caller"
"""Key of a call's state: its caller."""

ROUTE = "route"
"""Key of a call's state: the path of its route, and the scope that the route needs."""


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
        scopes: What it may do.
        max_priority: The highest priority it may ask for; None for `gateway.max_priority`.
        models: The models it may use; None for all.
        limits: The limits of its key and its tenant.
    """

    key_id: str = ""
    name: str = ""
    tenant: str = ""
    scopes: frozenset[Scope] = frozenset()
    max_priority: int | None = None
    models: tuple[str, ...] | None = None
    limits: tuple[AppliedLimits, ...] = ()


NOBODY = Caller()
"""The caller of endpoints that need no scope."""

ANYBODY = Caller(scopes=frozenset(SCOPES))
"""Every caller of a gateway without keys."""


def caller_of(request: Request) -> Caller:
    """Return the caller that the policy chain has authenticated."""
    found: Caller = request.scope.get("state", {}).get(CALLER, NOBODY)
    return found


def may_use(caller: Caller, model: str) -> bool:
    """Return whether a caller may use a model or an adapter."""
    return caller.models is None or model in caller.models


def shown_path(caller: Caller, path: str) -> str:
    """Return a path of the server as a caller may see it: without the scope "admin" its name."""
    return path if "admin" in caller.scopes else PurePath(path).name


def check_allowed(caller: Caller, model: str) -> None:
    """Raises RequestError `model_not_found` when a caller may not use a model."""
    if not may_use(caller, model):
        raise RequestError(
            f"there is no model {model!r:.80} for this key; /v1/models lists those that there are",
            code="model_not_found",
        )
