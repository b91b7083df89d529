"""The envelope of a message between stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Union

import msgspec

from . import messages, recovery, steps  # noqa: F401  (they define the messages)
from .control import Internal


def _kinds(message: Any) -> list[Any]:
    """Return a class, or the classes below it."""
    below = message.__subclasses__()
    return [kind for each in below for kind in _kinds(each)] if below else [message]


if TYPE_CHECKING:
    Message = Internal
else:
    # The decoder takes a union: all messages of `messages`, `steps`, `control` and `recovery`.
    Message = Union[tuple(_kinds(Internal))]  # noqa: UP007


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A message between stages, with its id, epoch, trace context and budget.

    Attributes:
        body: The message.
        epoch: Receivers drop what is older than the epoch they are in; 0 belongs to none and is
            always taken.
        sender: The sending stage's incarnation, for example "batching-3f2a".
        id: Counts up for each sender and link, from 1, so that a link can drop a repeated write.
        sent_ns: When it was handed to the link.
        traceparent: W3C trace context of the request in the body; empty when there is none, or
            when there are several and the body itself names them.
        tracestate: As traceparent.
        budget_ns: Remaining time of the request at `sent_ns`; None means no deadline. Each
            hop turns it into a deadline by its own clock, so clocks need not agree.
        operation_id: Id under which the sender of a control message waits for the reply
            (`Replies`); "" if no reply is expected.
    """

    body: Message
    epoch: int = 0
    sender: str = ""
    id: int = 0
    sent_ns: int = 0
    traceparent: str = ""
    tracestate: str = ""
    budget_ns: int | None = None
    operation_id: str = ""
