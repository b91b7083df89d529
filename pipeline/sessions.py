"""Arguments and results of calls about sessions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

from ..bus.public import KVSessionResult, SessionAction, SessionOutcome
from ..config import RequestError, shown

_ACTIONS: tuple[SessionAction, ...] = get_args(SessionAction)

_ORDER: tuple[SessionOutcome, ...] = ("missing", "rejected", "deferred", "clipped", "accepted")
"""Outcomes; of several replicas the last one counts."""


def check_action(action: Any) -> SessionAction:
    """Return an action. Raises RequestError, `invalid_kv_session`, if it is none."""
    if action not in _ACTIONS:
        raise RequestError(
            f"the action is {shown(action)}; it must be one of {', '.join(_ACTIONS)}",
            code="invalid_kv_session",
        )
    found: SessionAction = action
    return found


def best_result(results: Iterable[KVSessionResult | None]) -> KVSessionResult:
    """Return the result of the replica that did most: the others have an earlier turn, or none."""
    missing = KVSessionResult(outcome="missing", reason="no replica has answered")
    return max(
        (result for result in results if result is not None),
        key=lambda result: (_ORDER.index(result.outcome), result.num_tokens),
        default=missing,
    )
