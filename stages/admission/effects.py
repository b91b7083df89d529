"""Effects of admission's core (`EpochCore.handle`), which the shell performs in order.

Some are answered with an event, a method of the core that their docstring names: it is handled, and
its own effects performed, before the next effect.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ...bus.control import Cancel, ReplicaCapacity
from ...bus.entries import RequestEntry
from ...bus.messages import RequestOpened
from ...bus.public import ErrorInfo
from ...bus.recovery import RecoveredSample, RecoveryItem
from .arrivals import Accepted, Arrival, Step


class Effect(msgspec.Struct, frozen=True):
    """Base of all effects."""


class Then(Effect, frozen=True):
    """Continue in the core: the effects before are performed, and their answers handled."""

    step: Step


class BeginEpoch(Effect, frozen=True):
    """Get the next epoch's number, for `open_epoch`."""

    reason: str


class SendReset(Effect, frozen=True):
    """Send Reset to a stage."""

    role: str


class SetCapacity(Effect, frozen=True):
    """Set the capacity that requests must fit."""

    capacity: ReplicaCapacity


class Renew(Effect, frozen=True):
    """Renew the leases of held entries; `renewed` gets those that other lanes have."""


class MarkPossiblyLost(Effect, frozen=True):
    """Mark held entries as possibly lost by the server; they stay this lane's."""


class Claim(Effect, frozen=True):
    """Claim the request ids of inherited entries, for `admit_inherited`.

    Attributes:
        overdue: Their deadlines have passed, so their prompts are not tokenised.
    """

    entries: tuple[RequestEntry, ...]
    overdue: bool = False


class Tokenize(Effect, frozen=True):
    """Tokenise a long prompt apart; `arrive` follows, while the lane is open."""

    arrival: Arrival


class Judge(Effect, frozen=True):
    """Accept an entry or refuse it, for `enter`.

    Attributes:
        owner: The entry with its request id, in flight or by its result stream.
        cancelled: The end of an accepted request that was cancelled before.
        draining: Whether every request is refused.
    """

    arrival: Arrival
    owner: str | None
    cancelled: Cancel | None
    draining: bool


class Ask(Effect, frozen=True):
    """Ask streaming what it has of these requests; `give_up` follows if a message can't be sent.

    Attributes:
        opened: Messages to send first, of accepted requests.
        replica: A replica whose executor takes part.
    """

    items: tuple[RecoveryItem, ...]
    opened: tuple[RequestOpened, ...]
    replica: int = 0


class Forward(Effect, frozen=True):
    """Send a request into the lane; `give_up` follows if it can't be sent.

    Attributes:
        key: Key of its entry.
        deadline_ns: On this process's clock.
        samples: Samples so far of a resumed request; None for a new one.
        down_since_ns: When the lane stopped serving, for a resumed request.
    """

    key: str
    accepted: Accepted
    deadline_ns: int | None
    samples: tuple[RecoveredSample, ...] | None = None
    down_since_ns: int = 0


class CutShort(Effect, frozen=True):
    """Send a cancellation into the lane."""

    cancel: Cancel


class End(Effect, frozen=True):
    """Have streaming end a request that is not in the lane."""

    cancel: Cancel


class Forget(Effect, frozen=True):
    """Have streaming drop a request that another lane has."""

    cancel: Cancel


class AddDeadLetter(Effect, frozen=True):
    """Dead-letter an entry.

    Attributes:
        trace: Traceparent and tracestate.
        deaths: Failures of the lane.
    """

    entry: RequestEntry
    trace: tuple[str, str]
    error: ErrorInfo
    deaths: int


class Acknowledge(Effect, frozen=True):
    """Acknowledge an entry whose terminal message is written under this request id."""

    entry_id: str
    request_id: str


class TakePart(Effect, frozen=True):
    """Mark admission as ready, since every request is resumed."""


class SetGate(Effect, frozen=True):
    """Admit new requests, or none until the next SetGate."""

    is_open: bool


class StopTaking(Effect, frozen=True):
    """Take nothing more from the queue."""


class StopWaiting(Effect, frozen=True):
    """Don't tokenise the prompt of the entry with a key if it still waits for that; "" for all."""

    key: str = ""


class Drained(Effect, frozen=True):
    """Report that every taken entry is answered."""


class TraceCancel(Effect, frozen=True):
    """Record the span of a cancellation. `trace`: traceparent and tracestate."""

    trace: tuple[str, str]
    cancel: Cancel


class Log(Effect, frozen=True):
    """Write a log line.

    Attributes:
        request_id: Request id of its request; "" for none.
        trace: The request's traceparent and tracestate.
    """

    level: Literal["debug", "info", "warning"]
    event: str
    fields: dict[str, object] = {}
    request_id: str = ""
    trace: tuple[str, str] = ("", "")
