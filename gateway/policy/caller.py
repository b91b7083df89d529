"""Who calls, as the policy knows him."""

from __future__ import annotations

import msgspec
from starlette.requests import Request

from ...config import RequestError
from .document import SCOPES, Limits, Scope

CALLER = "caller"
"""Under which a call's state has who calls."""

ROUTE = "route"
"""Under which it has the path of the route that it took, and what that asks of callers."""


class AppliedLimits(msgspec.Struct, frozen=True):
    """Limits, and of whom: "key:<id>" or "tenant:<name>"."""

    name: str
    limits: Limits


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who calls.

    Attributes:
        key_id: The id of his key, or what his token says he is; "" where nobody asks.
        name: What people call that.
        tenant: Whose his requests are; "" where he says so himself.
        scopes: What he may do.
        max_priority: Requests that ask for more are refused; None for `gateway.max_priority`.
        models: The models that he may use; None for all.
        limits: How much he may use.
    """

    key_id: str = ""
    name: str = ""
    tenant: str = ""
    scopes: frozenset[Scope] = frozenset()
    max_priority: int | None = None
    models: tuple[str, ...] | None = None
    limits: tuple[AppliedLimits, ...] = ()


NOBODY = Caller()
"""Of calls that ask for nothing."""

ANYBODY = Caller(scopes=frozenset(SCOPES))
"""Where there are no keys: whoever reaches the gateway may do everything."""


def caller_of(request: Request) -> Caller:
    """As the chain has found him."""
    found: Caller = request.scope.get("state", {}).get(CALLER, NOBODY)
    return found


def may_use(caller: Caller, model: str) -> bool:
    """Return whether a caller may use a model or an adapter."""
    return caller.models is None or model in caller.models


def check_allowed(caller: Caller, model: str) -> None:
    """Raises RequestError `model_not_found` when a caller may not use a model."""
    if not may_use(caller, model):
        raise RequestError(
            f"there is no model {model!r:.80} for this key; /v1/models lists those that there are",
            code="model_not_found",
        )
