"""Where a call comes from: whose it is, in which trace, and how much time it has."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import NamedTuple

from starlette.requests import Request

from ...config import RequestError, shown
from ...telemetry import TraceContext, now_ns
from ..policy.caller import ANYBODY, Caller, caller_of
from ..policy.document import MAX_TENANT_LENGTH
from ..server.calls import arrival_of
from ..server.http import NAMED_MODEL
from .account import Account

TENANT_HEADER = "X-Tenant"


def tenant_of(request: Request) -> str:
    """The tenant of the caller's key; where there are no keys, what the header names, else the
    address that the connection comes from.

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
    """An address; of IPv6 the network that one client has as a rule, 64 bits of it."""
    try:
        # What stands behind % is this machine's name for the interface.
        address: IPv4Address | IPv6Address = ip_address(host.partition("%")[0])
    except ValueError:
        return host if host.isprintable() and 0 < len(host) <= 64 else "unknown"
    if isinstance(address, IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(IPv6Network((address, 64), strict=False))


BUDGET_HEADER = "X-Budget-Ms"

MAX_BUDGET_MS = float(2**63 // 1_000_000)
"""In nanoseconds it fits 64 bits, which the bus wants."""

_NUMBER = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,9})?")


def call_deadline_ns(request: Request, arrived_ns: int, budget_ms: float | None) -> int | None:
    """When a call's time is over, on the clock of `arrived_ns`; None when it has no limit.

    The time counts from the call's arrival. Of several limits the shortest one holds. None or less
    than none of it may be left: then it is over already, as on the bus.

    Args:
        request: Whose header may give a budget in milliseconds.
        arrived_ns: When the call arrived.
        budget_ms: What its body says; None when it says nothing.

    Raises:
        RequestError: invalid_budget.
    """
    budgets_ms = [_header_ms(text) for text in request.headers.getlist(BUDGET_HEADER)]
    if budget_ms is not None:
        budgets_ms.append(_checked_ms(budget_ms, "budget_ms"))
    return arrived_ns + int(min(budgets_ms) * 1e6) if budgets_ms else None


def _header_ms(text: str) -> float:
    if _NUMBER.fullmatch(text.strip()) is None:
        raise _invalid(BUDGET_HEADER, shown(text))
    return _checked_ms(float(text), BUDGET_HEADER)


def _checked_ms(budget_ms: float, name: str) -> float:
    # Written so that NaN fails.
    if not abs(budget_ms) <= MAX_BUDGET_MS:
        raise _invalid(name, shown(budget_ms))
    return budget_ms


def _invalid(name: str, given: str) -> RequestError:
    return RequestError(
        f"{name} is {given}; it must be a number of milliseconds, such as 1500, that fits 64 bits "
        "in nanoseconds. Leave it out for no deadline",
        code="invalid_budget",
    )


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
    limited_by: str = f"{BUDGET_HEADER}, budget_ms or gRPC's deadline"

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
