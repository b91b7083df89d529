"""How much time a request has, as its parameters say it.

`timeout_ns` is what is left when the request is sent, so that clocks need not agree: each hop makes
a deadline on its own clock of it, and sends on what is left then.
"""

from __future__ import annotations

from typing import NamedTuple

from ..config import RequestError, shown
from .tensors import Parameters

TIMEOUT_NS_PARAM = "timeout_ns"
"""The parameter that has a request's remaining budget in nanoseconds."""

TRITON_TIMEOUT_PARAM = "timeout"
"""Triton's own, in microseconds; 0 is no limit there."""

_MAX_NS = 2**63 - 1


def deadline_params(budget_ns: int) -> dict[str, int]:
    """The parameters that tell a budget; none for one of zero or less, which is no deadline."""
    return {TIMEOUT_NS_PARAM: min(budget_ns, _MAX_NS)} if budget_ns > 0 else {}


class Budget(NamedTuple):
    """The time that a request has, in nanoseconds, and the parameter that says so."""

    ns: int
    param: str


def budget_of(parameters: Parameters) -> Budget | None:
    """The time that a request has by its parameters; None when it has no limit.

    Of both, the shorter one holds. A `timeout_ns` of zero or less is over already.

    Raises:
        RequestError: invalid_budget.
    """
    budgets: list[Budget] = []
    if (given := parameters.get(TIMEOUT_NS_PARAM)) is not None:
        budgets.append(Budget(_checked(TIMEOUT_NS_PARAM, given), TIMEOUT_NS_PARAM))
    if (given := parameters.get(TRITON_TIMEOUT_PARAM)) is not None:
        micros = _checked(TRITON_TIMEOUT_PARAM, given)
        if micros < 0:
            raise _invalid(TRITON_TIMEOUT_PARAM, given)
        if micros:
            budgets.append(Budget(min(micros * 1000, _MAX_NS), TRITON_TIMEOUT_PARAM))
    return min(budgets) if budgets else None


def _checked(name: str, given: object) -> int:
    # Over HTTP a number in JSON may have a point, and a boolean is one for Python.
    whole = not isinstance(given, bool) and (
        isinstance(given, int) or (isinstance(given, float) and given.is_integer())
    )
    if not whole or abs(int(given)) > _MAX_NS:  # type: ignore[call-overload]  # a number by now
        raise _invalid(name, given)
    return int(given)  # type: ignore[call-overload, no-any-return]


def _invalid(name: str, given: object) -> RequestError:
    unit = "nanoseconds" if name == TIMEOUT_NS_PARAM else "microseconds, from 0,"
    return RequestError(
        f"the parameter {name} is {shown(given)}; it must be a whole number of {unit} that fits 64 "
        "bits. Leave it out for no deadline",
        code="invalid_budget",
    )
