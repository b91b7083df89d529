"""The origin of a call: its tenant, trace, deadline and caller."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import NamedTuple

from starlette.requests import Request

from ...config import RequestError, shown
from ...telemetry import TraceContext, now_ns
from ..policy.caller import ANYBODY, Caller, caller_of
from ..policy.document import MAX_TENANT_LENGTH
from ..server.calls import observed_call
from ..server.http import NAMED_MODEL
from .account import Account

TENANT_HEADER = "X-Tenant"
BUDGET_HEADER = "X-Budget-Ms"

MAX_BUDGET_MS = float(2**63 // 1_000_000)
"""In nanoseconds it fits 64 bits, as the bus requires."""

_NUMBER = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,9})?")


class Origin(NamedTuple):
    """The origin of a call.

    Attributes:
        tenant: The tenant of its requests.
        trace: The parent of its requests' spans.
        deadline_ns: On the clock of `now_ns`; None for none.
        account: Counts its requests' tokens.
        caller: The caller.
        requested_model: The model's name as the caller wrote it, which may be an alias; "" if none.
        limited_by: What may have set the deadline, for errors.
    """

    tenant: str
    trace: TraceContext
    deadline_ns: int | None
    account: Account
    caller: Caller = ANYBODY
    requested_model: str = ""
    limited_by: str = f"{BUDGET_HEADER}, budget_ms or gRPC's deadline"

    @property
    def left_ns(self) -> int | None:
        """The time until the deadline; may be negative."""
        return None if self.deadline_ns is None else self.deadline_ns - now_ns()


def origin_of(request: Request, budget_ms: float | None, requested_model: str = "") -> Origin:
    """Return the origin of a call.

    Args:
        request: The call; its headers may have its trace and its budget.
        budget_ms: The budget in its body; None if there is none.
        requested_model: The model's name in its body; "" if there is none.

    Raises:
        RequestError: invalid_tenant, invalid_budget.
    """
    call = observed_call(request)
    call.account.tenant = tenant_of(request)
    return Origin(
        call.account.tenant,
        call.trace,
        call_deadline_ns(request, call.at_ns, budget_ms),
        call.account,
        caller_of(request),
        requested_model or request.scope.get("state", {}).get(NAMED_MODEL, ""),
    )


def call_deadline_ns(request: Request, arrived_ns: int, budget_ms: float | None) -> int | None:
    """Return the deadline of a call, on the clock of `arrived_ns`; None if it has none.

    The budget counts from the call's arrival. The shortest of several budgets holds; one of 0 or
    less is over already, as on the bus.

    Raises:
        RequestError: invalid_budget.
    """
    budgets_ms = []
    for text in request.headers.getlist(BUDGET_HEADER):
        if _NUMBER.fullmatch(text.strip()) is None:
            raise _invalid_budget(BUDGET_HEADER, shown(text))
        budgets_ms.append((BUDGET_HEADER, float(text)))
    if budget_ms is not None:
        budgets_ms.append(("budget_ms", budget_ms))
    for name, budget in budgets_ms:
        # Written so that NaN fails.
        if not abs(budget) <= MAX_BUDGET_MS:
            raise _invalid_budget(name, shown(budget))
    if not budgets_ms:
        return None
    return arrived_ns + int(min(budget for _, budget in budgets_ms) * 1e6)


def _invalid_budget(name: str, given: str) -> RequestError:
    return RequestError(
        f"{name} is {given}; it must be a number of milliseconds, such as 1500, that fits 64 bits "
        "in nanoseconds. Leave it out for no deadline",
        code="invalid_budget",
    )


def tenant_of(request: Request) -> str:
    """Return the tenant of the caller's key; without keys, of the header, else of the address.

    Without keys, tenants separate well-behaved clients only, since a name can be invented.

    Raises:
        RequestError: invalid_tenant.
    """
    if known := caller_of(request).tenant:
        return known
    named = request.headers.get(TENANT_HEADER)
    if named is None:
        return f"http:{_network(request.client.host)}" if request.client else "http"
    if not (0 < len(named) <= MAX_TENANT_LENGTH and named.isprintable()):
        raise RequestError(
            f"{TENANT_HEADER} is {shown(named)}; it must be 1 to {MAX_TENANT_LENGTH} printable "
            "characters",
            code="invalid_tenant",
        )
    return named


def _network(host: str) -> str:
    """Return an IPv4 address, or the /64 network of an IPv6 one, which usually is one client."""
    try:
        # After % comes this machine's name for the interface.
        address: IPv4Address | IPv6Address = ip_address(host.partition("%")[0])
    except ValueError:
        return host if host.isprintable() and 0 < len(host) <= 64 else "unknown"
    address = getattr(address, "ipv4_mapped", None) or address
    if isinstance(address, IPv4Address):
        return str(address)
    return str(IPv6Network((address, 64), strict=False))
