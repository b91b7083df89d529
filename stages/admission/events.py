"""Events of admission's core, beside messages of the bus; see `effects.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

from ...bus.control import Cancel, StageReady
from ...bus.entries import RequestEntry
from ...bus.messages import AdmittedRequest, Message, RequestOpened
from ...bus.public import ErrorInfo


class Tokens(NamedTuple):
    """Token ids of a request's prompt and of its prediction."""

    prompt: tuple[int, ...]
    prediction: tuple[int, ...] = ()


class Accepted(NamedTuple):
    """A valid request: the message for streaming, and the one for the lane."""

    opened: RequestOpened
    admitted: AdmittedRequest


Tokenized = Tokens | Exception
"""A request's tokens, or why it is refused."""


class Arrival(msgspec.Struct, frozen=True):
    """An entry that arrives for admission.

    Attributes:
        received_ns: When it was taken, on this process's clock.
        owner: The entry with its request id, by the result streams.
        way: "taken" from the queue; "inherited" from a predecessor or another lane, at the
            beginning of an epoch; "late": inherited, and tokenised while the others were resumed.
        tokenized: None if it is to be tokenised.
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
    """Base of events that are no messages of the bus."""


Step = Callable[[int], None]
"""A continuation within the core; it gets the time in nanoseconds."""

AnyEvent = Event | Message | Step
"""An input of the core; a message that admission has no use for is logged."""


class Began(Event, frozen=True):
    """Admission has started. `pending`: a predecessor's unanswered entries."""

    pending: tuple[RequestEntry, ...]


class EpochBegun(Event, frozen=True):
    """Result of BeginEpoch: the new epoch's number."""

    epoch: int
    reason: str


class LargerEpoch(Event, frozen=True):
    """The stages are in a larger epoch: a successor's, or one that the server has lost."""


class Ready(Event, frozen=True):
    """A stage takes part in an epoch."""

    message: StageReady
    epoch: int


class Lost(Event, frozen=True):
    """A stage has stopped; what it held is lost. `failed`: it has crashed."""

    role: str
    reason: str
    failed: bool


class Renewed(Event, frozen=True):
    """Result of Renew, and of the lane's periodic renewals: entries that other lanes have."""

    lost: frozenset[str]


class Claimed(Event, frozen=True):
    """Result of Claim.

    Attributes:
        owners: For each entry, the entry with its request id: itself if the request may have begun,
            None if the id was free.
        long: For each entry, whether its prompt takes long to tokenise.
    """

    entries: tuple[RequestEntry, ...]
    owners: tuple[str | None, ...]
    long: tuple[bool, ...]


class Arrived(Event, frozen=True):
    """An entry arrives while the lane is open."""

    arrival: Arrival


class Judged(Event, frozen=True):
    """Result of Judge.

    Attributes:
        accepted: The valid request; None of an invalid one.
        end: The end of a refused or cancelled request.
        failure: Why the entry can't be processed.
    """

    arrival: Arrival
    accepted: Accepted | None = None
    end: Cancel | None = None
    failure: ErrorInfo | None = None


class ForwardFailed(Event, frozen=True):
    """Result of Forward and Ask, if a message of the request can't be sent."""

    entry_id: str
    error: ErrorInfo


class TakenOver(Event, frozen=True):
    """This lane has taken over entries of a lane that renewed no lease."""

    entries: tuple[RequestEntry, ...]


class Tick(Event, frozen=True):
    """Time has passed: check deadlines."""
