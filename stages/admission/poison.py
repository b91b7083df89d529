"""Entries that are given up: admission can't handle them or hand them on, or the lane fails."""

from __future__ import annotations

from ...bus.public import ErrorInfo
from ...config import BusError, NanoInferenceError, shown

MESSAGE_TOO_LARGE = "message_too_large"

GIVEN_UP_CODES = ("lane_failed", MESSAGE_TOO_LARGE, NanoInferenceError.code)
"""Why entries become dead letters, as a rule."""


def is_of_the_entry(error: Exception) -> bool:
    """Whether an error is of the one entry that was worked on, not of the bus or of the lane.

    The bus may come back, and a lane that was replaced must end. All else would come again with the
    same entry, at each start of this stage and of every successor.
    """
    return not isinstance(error, BusError) or error.code == MESSAGE_TOO_LARGE


def why_given_up(error: Exception) -> ErrorInfo:
    """What the client of such an entry is told."""
    kept = "its entry is kept among the dead letters"
    if isinstance(error, BusError):
        message = f"the request can't be handed on: {error.message}. Shorten it, or lower n; {kept}"
        return ErrorInfo(code=error.code, message=message)
    code = error.code if isinstance(error, NanoInferenceError) else NanoInferenceError.code
    cause = f"{type(error).__name__}: {shown(str(error))}"
    return ErrorInfo(code=code, message=f"the request could not be handled ({cause}); {kept}")


def why_dead(deaths: int) -> ErrorInfo:
    """What the client of a request is told that may be the reason why its lane fails."""
    message = (
        f"the lane failed {deaths} times during this request, so it is given up; its entry is "
        "kept among the dead letters"
    )
    return ErrorInfo(code="lane_failed", message=message)
