"""Token usage and other facts of one call, for the access log, the audit log and limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...bus.public import Usage

Texts = Callable[[], Sequence[str]]
"""Returns texts of a call, called in a thread."""


def no_time() -> int:
    """Return 0: of a call whose client reads, or is not observed."""
    return 0


@dataclass(slots=True, kw_only=True, eq=False)
class Account:
    """The account of one call.

    Attributes:
        background: It goes on without its connection, whose account is another.
        tenant: "" of a call without one, such as a probe.
        code: Of the error that ended it; "content_filter" also if an answer was cut.
        model: Of its requests.
        texts: For the audit log, by name.
        prompt_tokens: Of its ended requests.
        completion_tokens: Of its ended requests.
        sent_bytes: Of its response's body.
        complete: Whether its response was sent whole.
        left: Of requests whose end the gateway hasn't seen, by id, the tokens that came; None if
            their number is unknown.
        headers: More headers of its response.
        arrived_ns: When its first byte came; 0 if it goes on without its connection.
        unread_ns: Returns for how long its client has not read.
        unread_before_ns: That at the end of its last request.
        time: Of its request that took longest, by cause; its requests' bills.
    """

    background: bool = False
    tenant: str = ""
    code: str = ""
    model: str = ""
    texts: dict[str, Texts] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    sent_bytes: int = 0
    complete: bool = False
    left: dict[str, int | None] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    arrived_ns: int = 0
    unread_ns: Callable[[], int] = no_time
    unread_before_ns: int = 0
    time: dict[str, int] = field(default_factory=dict)
    billed_ns: int = 0

    @property
    def tokens(self) -> int:
        """The tokens of its ended requests."""
        return self.prompt_tokens + self.completion_tokens

    def add(self, usage: Usage) -> None:
        """Add the tokens of a request that has ended."""
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens
        self.billed_ns += usage.billed_ns or 0
        if usage.time is not None and sum(usage.time.values()) > sum(self.time.values()):
            self.time = usage.time
