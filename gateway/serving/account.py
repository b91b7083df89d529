"""What a call has come to, told in the access log: no text of anybody's, only who and how much."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...bus.public import Usage
from ...config import shown
from ...config.logger import get_logger
from ...telemetry import TraceContext

Texts = Callable[[], Sequence[str]]
"""Gives texts of a call, beside the event loop."""


class Account:
    """Of one call.

    Attributes:
        background: It goes on without the connection that it came by, whose account is another.
        tenant: Whose it is; "" for a call that is nobody's, such as a question about health.
        prompt_tokens: Of its requests that have ended.
        completion_tokens: The same.
        sent_bytes: Of its answer's body.
        complete: Whether its answer came to its end.
        code: Of the error that it ended with; "content_filter" too where an answer was cut.
        model: Of its requests.
        texts: What the audit log may tell of, each by its name there.
        left: Of its requests that nobody waited for until they ended, the tokens that had come;
            None where nobody can tell how many were made.
        headers: What its answer is to say besides.
    """

    __slots__ = (
        "background",
        "code",
        "complete",
        "completion_tokens",
        "headers",
        "left",
        "model",
        "prompt_tokens",
        "sent_bytes",
        "tenant",
        "texts",
    )

    def __init__(self, *, background: bool = False) -> None:
        self.background = background
        self.tenant = ""
        self.code = ""
        self.model = ""
        self.texts: dict[str, Texts] = {}
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.sent_bytes = 0
        self.complete = False
        self.left: dict[str, int | None] = {}
        self.headers: dict[str, str] = {}

    @property
    def tokens(self) -> int:
        """Of its requests that have ended."""
        return self.prompt_tokens + self.completion_tokens

    def add(self, usage: Usage) -> None:
        """A request of the call has ended."""
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens

    def log(
        self,
        *,
        method: str,
        route: str,
        path: str,
        status: int,
        duration_ns: int,
        call_id: str,
        client: str,
        trace: TraceContext,
    ) -> None:
        """Writes the call's line.

        Args:
            method: One that there is.
            route: The path when it is one that there is, else "".
            path: As it was asked for; quoted and cut, and only where there is no route.
            status: Of the answer.
            duration_ns: From the call's arrival to the end of its answer.
            call_id: What the call is named.
            client: The address that it came from.
            trace: The one that it is in.
        """
        fields: dict[str, str | int | float | bool] = {"route": route}
        if not route:
            fields["path"] = shown(path)
        if self.model:
            fields["model"] = self.model
        if self.tenant:
            fields |= {
                "tenant": self.tenant,
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.completion_tokens,
            }
        if not self.complete:
            fields["complete"] = False
        get_logger().info(
            "http_call",
            method=method,
            **fields,
            status=status,
            duration_ms=round(duration_ns / 1e6, 2),
            sent_bytes=self.sent_bytes,
            call_id=call_id,
            client=client,
            **trace.log_ids,
        )
