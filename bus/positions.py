"""Positions among all results: errors of their readers."""

from __future__ import annotations

from ..config import BusError, RequestError, shown


def results_lost(reason: str) -> BusError:
    """Return the error of a reader of all results that would miss some."""
    return BusError(
        f"results after this position are no longer there: {reason}. Follow anew without a "
        "position, and look up by its id each request whose result is missing",
        code="results_lost",
    )


def invalid_position(position: str) -> RequestError:
    """Return the error of an unreadable position among all results."""
    return RequestError(
        f"{shown(position)} is no position among results; give the id of an event that was read, "
        "or leave it out to begin now",
        code="invalid_position",
    )
