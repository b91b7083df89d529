"""Entries that arrive for admission, and their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

from ...bus.control import Cancel
from ...bus.entries import RequestEntry
from ...bus.messages import AdmittedRequest, Prompt, RequestOpened
from ...bus.public import ErrorInfo
from ...bus.sections import Sections
from ...text.image_tokens import Size


class PromptImage(NamedTuple):
    """An image of a prompt.

    Attributes:
        id: Id of the image's pixels.
        size: Width and height.
        name: In the store.
    """

    id: str
    size: Size
    name: str


class Tokens(NamedTuple):
    """A tokenised request.

    Attributes:
        prompt: Its prompt.
        parts: Sections of the AdmittedRequest.
    """

    prompt: Prompt
    parts: Sections = ()


class ResponseKey(NamedTuple):
    """Identity of a response: it is a function of these.

    Attributes:
        digest: SHA-256 of prompt, parameters, scope and versions. Tenants choose most of these, so
            the hash must withstand a search for collisions.
        weight_version: Version of the weights when the request was admitted.
        adapter_version: Version of the adapter; 0 without one.
    """

    digest: bytes
    weight_version: int
    adapter_version: int


class Accepted(NamedTuple):
    """A valid request: the message for streaming, and the one for the lane.

    Attributes:
        key: Its key in the response cache; None if it can't be there.
    """

    opened: RequestOpened
    admitted: AdmittedRequest
    key: ResponseKey | None = None


Tokenized = Tokens | Exception
"""A request's tokens, or the error that refuses it."""

Step = Callable[[int], None]
"""An event or a continuation of admission's core; it gets the time in nanoseconds."""


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
    def key(self) -> str:
        return self.entry.key


class Judged(msgspec.Struct, frozen=True):
    """An arrival that was accepted or refused.

    Attributes:
        accepted: The valid request; None of an invalid one.
        end: The end of a refused or cancelled request.
        failure: Why the entry can't be processed.
    """

    arrival: Arrival
    accepted: Accepted | None = None
    end: Cancel | None = None
    failure: ErrorInfo | None = None
