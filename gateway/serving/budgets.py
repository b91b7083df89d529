"""The time that a call may take, as its client or a proxy says it."""

from __future__ import annotations

import re

from starlette.requests import Request

from ...config import RequestError, shown

HEADER = "X-Budget-Ms"

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
    budgets_ms = [_header_ms(text) for text in request.headers.getlist(HEADER)]
    if budget_ms is not None:
        budgets_ms.append(_checked_ms(budget_ms, "budget_ms"))
    return arrived_ns + int(min(budgets_ms) * 1e6) if budgets_ms else None


def _header_ms(text: str) -> float:
    if _NUMBER.fullmatch(text.strip()) is None:
        raise _invalid(HEADER, shown(text))
    return _checked_ms(float(text), HEADER)


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
