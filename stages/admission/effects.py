"""What admission's core wants done: events go in, effects come out (`EpochCore.handle`).

The shell performs them in order. Some give an answer: the event that their docstring names, which
is handled, and its own effects performed, before the next effect.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ...bus.channel import RequestEntry
from ...bus.control import Cancel, ReplicaCapacity
from ...bus.messages import AdmittedRequest, RecoveredSample, RecoveryItem
from ...bus.public import ErrorInfo
from .events import AnyEvent, Arrival


class Effect(msgspec.Struct, frozen=True):
    """Something that is to be done."""


class Then(Effect, frozen=True):
    """The effects before this one are done, and their answers handled: go on with this event."""

    event: AnyEvent


class BeginEpoch(Effect, frozen=True):
    """Take the next epoch's number. Gives EpochBegun."""

    reason: str


class SendReset(Effect, frozen=True):
    """Ask a stage to drop all and to take part in this epoch."""

    role: str


class SetCapacity(Effect, frozen=True):
    """What a request has to fit from now on."""

    capacity: ReplicaCapacity


class Renew(Effect, frozen=True):
    """Renew the lease of what is held. Gives Renewed."""


class Distrust(Effect, frozen=True):
    """The server may have lost entries that are held here, which stay ours."""


class Claim(Effect, frozen=True):
    """Claim the request ids of inherited entries. Gives Claimed.

    Attributes:
        overdue: They have no time left, so it does not matter how long their prompts are.
    """

    entries: tuple[RequestEntry, ...]
    overdue: bool = False


class Tokenize(Effect, frozen=True):
    """Tokenise a long prompt apart. Gives Arrived, later and at a time when requests are let in."""

    arrival: Arrival


class Judge(Effect, frozen=True):
    """Let an entry in, or refuse it. Gives Judged.

    Attributes:
        owner: The entry that has its request id, in flight or by its result stream.
        cancelled: How it ends if it is not refused, since it was cancelled on its way.
        draining: Whether everything is refused.
    """

    arrival: Arrival
    owner: str | None
    cancelled: Cancel | None
    draining: bool


class Ask(Effect, frozen=True):
    """Ask streaming what it has of these requests. `replica`: whose executor takes part."""

    items: tuple[RecoveryItem, ...]
    replica: int = 0


class HandOn(Effect, frozen=True):
    """Send a request into the lane. May give HandOnFailed.

    Attributes:
        entry_id: Its entry.
        request: As it was let in.
        deadline_ns: On this process's clock.
        samples: What there is of it; None for one that is new.
        down_since_ns: Since when the lane has served nothing, for one that is not.
    """

    entry_id: str
    request: AdmittedRequest
    deadline_ns: int | None
    samples: tuple[RecoveredSample, ...] | None = None
    down_since_ns: int = 0


class CutShort(Effect, frozen=True):
    """Send a cancellation after a request that is in the lane."""

    cancel: Cancel


class End(Effect, frozen=True):
    """Have streaming end a request of which nothing is in the lane."""

    cancel: Cancel


class Forget(Effect, frozen=True):
    """Tell streaming at once that another lane has a request."""

    cancel: Cancel


class Bury(Effect, frozen=True):
    """Keep an entry among the dead letters.

    Attributes:
        trace: Traceparent and tracestate.
        deaths: How often the lane failed.
    """

    entry: RequestEntry
    trace: tuple[str, str]
    error: ErrorInfo
    deaths: int


class Acknowledge(Effect, frozen=True):
    """An entry's terminal message is written, with this request id."""

    entry_id: str
    request_id: str


class TakePart(Effect, frozen=True):
    """Every request has been resumed: admission counts as ready."""


class OpenGate(Effect, frozen=True):
    """New requests may be let in."""


class CloseGate(Effect, frozen=True):
    """No new request is let in until OpenGate."""


class StopTaking(Effect, frozen=True):
    """Take nothing more from the queue."""


class Hurry(Effect, frozen=True):
    """An entry's prompt need not be tokenised any more; "" for all that wait for it."""

    entry_id: str = ""


class Drained(Effect, frozen=True):
    """Every entry that was taken is answered."""


class TraceCancel(Effect, frozen=True):
    """Make the span of a cancellation. `trace`: traceparent and tracestate."""

    trace: tuple[str, str]
    cancel: Cancel


class Log(Effect, frozen=True):
    """Write a line to the log.

    Attributes:
        level: Of the log.
        event: What the line says.
        fields: What else stands in it.
        request_id: Of the request that it is about, "" for none.
        trace: The request's traceparent and tracestate.
    """

    level: Literal["debug", "info", "warning"]
    event: str
    fields: dict[str, object] = {}
    request_id: str = ""
    trace: tuple[str, str] = ("", "")
