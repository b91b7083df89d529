"""What admission's core is told, beside the messages of the bus; see `effects.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

from ...bus.channel import RequestEntry
from ...bus.control import Cancel, StageReady
from ...bus.messages import AdmittedRequest, Message, RequestOpened
from ...bus.public import ErrorInfo


class Tokens(NamedTuple):
    """What the texts of a request are as tokens: its prompt, and what it predicts."""

    prompt: tuple[int, ...]
    prediction: tuple[int, ...] = ()


class Accepted(NamedTuple):
    """A valid request: the message for streaming, and the one for the lane."""

    opened: RequestOpened
    admitted: AdmittedRequest


Tokenized = Tokens | Exception
"""A request's tokens, or why it is not let in."""


class Arrival(msgspec.Struct, frozen=True):
    """An entry that is to be let in.

    Attributes:
        entry: As it was taken.
        received_ns: When it was taken, on this process's clock.
        owner: The entry that has its request id, as the result streams tell.
        way: "taken" from the queue; "inherited" from a predecessor or another lane, at the
            beginning of an epoch; "late": inherited, and tokenised while the others went on.
        tokenized: Its texts, where they were tokenised before.
    """

    entry: RequestEntry
    received_ns: int
    owner: str | None
    way: Literal["taken", "inherited", "late"] = "taken"
    tokenized: Tokenized | None = None

    @property
    def entry_id(self) -> str:
        return self.entry.entry_id


class Event(msgspec.Struct, frozen=True):
    """Something that has happened, beside the messages that come over the bus."""


Step = Callable[[int], None]
"""A continuation within the core; it gets the time in nanoseconds."""

AnyEvent = Event | Message | Step
"""An input of the core; a message that admission has no use for is logged."""


class Began(Event, frozen=True):
    """Admission has started; a predecessor has left these entries unanswered."""

    pending: tuple[RequestEntry, ...]


class EpochBegun(Event, frozen=True):
    """The answer to BeginEpoch: the number of the new epoch."""

    epoch: int
    reason: str


class LargerEpoch(Event, frozen=True):
    """The stages are in a larger epoch: a successor's, or of the time before the server lost it."""


class Ready(Event, frozen=True):
    """A stage takes part in an epoch."""

    message: StageReady
    epoch: int


class Lost(Event, frozen=True):
    """A stage has left; what it held is lost. `failed`: not in good order, but by itself."""

    role: str
    reason: str
    failed: bool


class Renewed(Event, frozen=True):
    """The answer to Renew, and what the lane's own renewals give: entries lost to other lanes."""

    lost: frozenset[str]


class Claimed(Event, frozen=True):
    """The answer to Claim.

    Attributes:
        entries: Those of the Claim.
        owners: For each entry the one that has its request id; its own id if somebody has worked
            on it, None if nobody had it.
        long: For each entry whether its prompt takes long to tokenise.
    """

    entries: tuple[RequestEntry, ...]
    owners: tuple[str | None, ...]
    long: tuple[bool, ...]


class Arrived(Event, frozen=True):
    """An entry is to be let in, at a time when requests are."""

    arrival: Arrival


class Judged(Event, frozen=True):
    """The answer to Judge: one of these.

    Attributes:
        accepted: The valid request; None of an invalid one.
        end: How the request ends, since it is refused or was cancelled.
        failure: Why nothing can be done with the entry.
    """

    arrival: Arrival
    accepted: Accepted | None = None
    end: Cancel | None = None
    failure: ErrorInfo | None = None


class HandOnFailed(Event, frozen=True):
    """The answer to HandOn, if the request can't be carried to the next stage."""

    entry_id: str
    error: ErrorInfo


class TakenOver(Event, frozen=True):
    """Entries of a lane that renewed no lease are this one's now."""

    entries: tuple[RequestEntry, ...]


class Tick(Event, frozen=True):
    """Time has passed."""
