"""Where a call comes from: whose it is, in which trace, and how much time it has."""

from __future__ import annotations

from typing import NamedTuple

from starlette.requests import Request

from ...telemetry import TraceContext, now_ns
from ..policy.caller import ANYBODY, Caller, caller_of
from ..server.calls import arrival_of
from ..server.http import NAMED_MODEL
from .account import Account
from .budgets import HEADER, call_deadline_ns


class Origin(NamedTuple):
    """Where a call comes from.

    Attributes:
        tenant: Whose it is.
        trace: Where the spans of its requests belong.
        deadline_ns: When its time is over, on the clock of `now_ns`; None when it has no limit.
        account: Where its requests' tokens are counted.
        caller: Who calls, and what he may.
        requested_model: The model's name as the caller wrote it, which may be an alias; "" if none.
        limited_by: Where its deadline may come from, for errors.
    """

    tenant: str
    trace: TraceContext
    deadline_ns: int | None
    account: Account
    caller: Caller = ANYBODY
    requested_model: str = ""
    limited_by: str = f"{HEADER}, budget_ms or gRPC's deadline"

    @property
    def left_ns(self) -> int | None:
        """What is left of its time, perhaps less than nothing."""
        return None if self.deadline_ns is None else self.deadline_ns - now_ns()


def origin_of(
    request: Request, tenant: str, budget_ms: float | None, requested_model: str = ""
) -> Origin:
    """A call's.

    Args:
        request: Whose headers may tell its trace and its time.
        tenant: As `tenant_of` says.
        budget_ms: The time that its body gives it; None when it says nothing.
        requested_model: The model's name in its body; "" if there is none.

    Raises:
        RequestError: invalid_budget.
    """
    arrival = arrival_of(request)
    arrival.account.tenant = tenant
    deadline_ns = call_deadline_ns(request, arrival.at_ns, budget_ms)
    return Origin(
        tenant,
        arrival.trace,
        deadline_ns,
        arrival.account,
        caller_of(request),
        requested_model or request.scope.get("state", {}).get(NAMED_MODEL, ""),
    )
