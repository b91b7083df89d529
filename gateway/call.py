"""A call: one caller's question to the gateway, over HTTP, over gRPC, or from a program."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any
from urllib.parse import parse_qsl

import anyio

from ..bus.public import Usage
from ..config import RequestError, shown
from ..telemetry import Operation, TraceContext, now_ns
from .caller import NOBODY, Caller, Needed

TENANT_HEADER = "X-Tenant"
BUDGET_HEADER = "X-Budget-Ms"

MAX_TENANT_LENGTH = 128
"""Characters of a tenant's name; admission takes no more."""

MAX_BUDGET_MS = float(2**63 // 1_000_000)
"""In nanoseconds it fits 64 bits, as the bus requires."""

IGNORED_HEADER = "X-Ignored-Fields"
"""The fields of a call's body that were taken without effect; in the response."""

MOST_IGNORED = 32
"""Fields that the header names."""

CLIENT_LEFT = 499
"""The status, which no client sees, of a request whose client has disconnected."""

_NO_TRACE = TraceContext()
_NUMBER = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,9})?")

Texts = Callable[[], Sequence[str]]
"""Returns texts of a call, called in a thread."""


class ClientLeft(Exception):
    """The client has disconnected; the answer has no reader."""


def no_time() -> int:
    """Return 0: of a call whose client reads, or is not observed."""
    return 0


def never() -> bool:
    """Return False: of a call that is not known to be cut off."""
    return False


def no_limit(more_bytes: int) -> None:
    """Count nothing."""


async def no_body(max_bytes: int) -> bytes:
    """Return an empty body."""
    return b""


async def no_chunks() -> AsyncIterator[bytes]:
    """Yield nothing."""
    return
    yield b""


@dataclass(slots=True, kw_only=True, eq=False)
class Account:
    """The account of one call.

    Attributes:
        background: It goes on without its connection, whose account is another.
        tenant: "" of a call without one, such as a probe.
        code: Code of the error that ended it; "content_filter" also if an answer was cut.
        model: Model of its requests.
        texts: For the audit log, by name.
        prompt_tokens: Prompt tokens of its ended requests.
        completion_tokens: Completion tokens of its ended requests.
        sent_bytes: Bytes of its response's body.
        complete: Whether its response was sent whole.
        left: Tokens received of each request whose end the gateway hasn't seen, by request id; None
            if their number is unknown.
        headers: More headers of its response.
        listed: Whether its requests are in the list of the gateway's last requests.
        ignored: Fields of its body that were taken without effect (`serving.fields`).
        arrived_ns: When its first byte came; 0 if it goes on without its connection.
        unread_ns: Returns for how long its client has not read.
        unread_before_ns: The unread time at the end of its last request.
        time: Time of its longest request, by cause; its requests' bills.
        operation: For its span and metrics; None before its first request, and where none are made.
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
    listed: bool = False
    ignored: dict[str, None] = field(default_factory=dict)
    arrived_ns: int = 0
    unread_ns: Callable[[], int] = no_time
    unread_before_ns: int = 0
    time: dict[str, int] = field(default_factory=dict)
    billed_ns: int = 0
    operation: Operation | None = None

    @property
    def ignored_names(self) -> str:
        """The ignored fields for a header or a log, "" for none; names must be plain."""
        listed = [name for name in self.ignored if name.isascii() and name.isprintable()]
        more = ", ..." if len(self.ignored) > MOST_IGNORED else ""
        return ", ".join(listed[:MOST_IGNORED]) + more

    @property
    def response_headers(self) -> dict[str, str]:
        """All headers of its response that are not the interface's own."""
        names = self.ignored_names
        return self.headers | {IGNORED_HEADER: names} if names else self.headers

    @property
    def tokens(self) -> int:
        """The tokens of its ended requests."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def usage(self) -> dict[str, int]:
        """The tokens of its ended requests, by field of a log."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        }

    def add(self, usage: Usage) -> None:
        """Add the tokens of a request that has ended."""
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens
        self.billed_ns += usage.billed_ns or 0
        if usage.time is not None and sum(usage.time.values()) > sum(self.time.values()):
            self.time = usage.time


@dataclass(eq=False, kw_only=True)
class Call:
    """A call of any protocol.

    Transports and programs make it; everything below them uses a call through it alone.

    Attributes:
        id: Its id in the logs and in the response.
        caller: The caller, once the policy chain has authenticated it.
        body: Its body, where that was read; `read` takes it.
        headers: In ASGI's form: lower-case names, with values.
        method: HTTP's method.
        path: The path of its address, without a model's own prefix.
        query_string: The query of its address.
        scheme: "http" or "https".
        address: The address that it came from; "" if it came from none.
        params: The parameters in its path.
        route: The path of its route; "" for none.
        needed: The scope that its route needs; None without a route.
        named_model: The model's name in its address, query or SGLang body.
        model: The id of its model, in a deployment of several models.
        requested_model: The model's name as the caller wrote it, which may be an alias; "" if none.
        at_ns: When its head was complete, on the clock of `now_ns`.
        trace: The parent of its requests' spans; empty without a trace.
        deadline_ns: On the clock of `now_ns`; None for none.
        limited_by: Settings that may have set the deadline, for errors.
        session: The session of its requests, whose token tree keeps them; None for that of the
            header X-Session-ID, "" for none.
        session_note: The note of its one request in the token tree.
        account: Counts its requests' tokens.
        status: The HTTP status of the response, so far.
        code: Code of the error that answered it.
        message: Message of that error.
        batch_line: Whether it is a line of a batch: its caller was authenticated when the batch was
            made, and its requests have the lowest priority.
        aborted: Whether a request of it was cancelled, so that its answer is not whole.
        hold: Counts bytes made of its body until it is answered. Raises `Overloaded` when there is
            no room for them.
        fetch: Reads its body from the connection. Raises `ClientLeft`, and RequestError
            (request_too_large) before more than so many bytes are in memory.
        chunks: Yields its body as it arrives, and holds none of it. Raises `ClientLeft`.
        cancelled: Returns once its client has left.
        may_return: Returns whether the connection of a client that has left was cut, so that it may
            come back to a durable call.
    """

    id: str = ""
    caller: Caller = NOBODY
    body: bytes | None = None
    headers: Sequence[tuple[bytes, bytes]] = ()
    method: str = "POST"
    path: str = ""
    query_string: bytes = b""
    scheme: str = "http"
    address: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    route: str = ""
    needed: Needed | None = None
    named_model: str = ""
    model: str = ""
    requested_model: str = ""
    at_ns: int = field(default_factory=lambda: now_ns())
    trace: TraceContext = _NO_TRACE
    deadline_ns: int | None = None
    limited_by: str = f"{BUDGET_HEADER}, budget_ms or gRPC's deadline"
    session: str | None = None
    session_note: str = ""
    account: Account = field(default_factory=Account)
    status: int = CLIENT_LEFT
    code: str = ""
    message: str = ""
    batch_line: bool = False
    aborted: bool = False
    hold: Callable[[int], None] = no_limit
    fetch: Callable[[int], Awaitable[bytes]] = no_body
    chunks: Callable[[], AsyncIterator[bytes]] = no_chunks
    cancelled: Callable[[], Awaitable[None]] = anyio.sleep_forever
    may_return: Callable[[], bool] = never

    async def read(self, max_bytes: int) -> bytes:
        """Return the body, once; see `fetch`."""
        body, self.body = self.body, None
        return await self.fetch(max_bytes) if body is None else body

    def header(self, name: str) -> str | None:
        """Return the first value of a header, whose name may be written in any case; or None."""
        values = self._values.get(name.lower().encode())
        return values[0].decode("latin-1") if values else None

    def header_values(self, name: str) -> list[str]:
        """Return all values of a header; see `header`."""
        values = self._values.get(name.lower().encode(), ())
        return [value.decode("latin-1") for value in values]

    @cached_property
    def _values(self) -> dict[bytes, list[bytes]]:
        found: dict[bytes, list[bytes]] = {}
        for name, value in self.headers:
            found.setdefault(name, []).append(value)
        return found

    @cached_property
    def query(self) -> dict[str, str]:
        """The query of its address; the last of equal names counts."""
        return dict(parse_qsl(self.query_string.decode("latin-1"), keep_blank_values=True))

    @cached_property
    def tenant(self) -> str:
        """The tenant of the caller's key; without keys, of the header, else of the address.

        Without keys, tenants separate well-behaved clients only, since a name can be invented.

        Raises:
            RequestError: invalid_tenant.
        """
        if known := self.caller.tenant:
            return known
        named = self.header(TENANT_HEADER)
        if named is None:
            return f"http:{_network(self.address)}" if self.address else "http"
        if not (0 < len(named) <= MAX_TENANT_LENGTH and named.isprintable()):
            raise RequestError(
                f"{TENANT_HEADER} is {shown(named)}; it must be 1 to {MAX_TENANT_LENGTH} printable "
                "characters",
                code="invalid_tenant",
            )
        return named

    @property
    def left_ns(self) -> int | None:
        """The time until the deadline; may be negative."""
        return None if self.deadline_ns is None else self.deadline_ns - now_ns()

    def begin(self, budget_ms: float | None = None, requested_model: str = "") -> None:
        """Set the tenant of its account, the deadline and the model, before its first request.

        The budget counts from the call's arrival. The shortest of several budgets holds; one of 0
        or less is over already, as on the bus.

        Args:
            budget_ms: The budget in its body; None if there is none.
            requested_model: The model's name in its body; "" if there is none.

        Raises:
            RequestError: invalid_tenant, invalid_budget.
        """
        self.account.tenant = self.tenant
        self.requested_model = requested_model or self.named_model
        budgets_ms = []
        for text in self.header_values(BUDGET_HEADER):
            if _NUMBER.fullmatch(text.strip()) is None:
                raise _invalid_budget(BUDGET_HEADER, shown(text))
            budgets_ms.append((BUDGET_HEADER, float(text)))
        if budget_ms is not None:
            budgets_ms.append(("budget_ms", budget_ms))
        for name, budget in budgets_ms:
            # Written so that NaN fails.
            if not abs(budget) <= MAX_BUDGET_MS:
                raise _invalid_budget(name, shown(budget))
        if budgets_ms:
            self.deadline_ns = self.at_ns + int(min(budget for _, budget in budgets_ms) * 1e6)


def _invalid_budget(name: str, given: str) -> RequestError:
    return RequestError(
        f"{name} is {given}; it must be a number of milliseconds, such as 1500, that fits 64 bits "
        "in nanoseconds. Leave it out for no deadline",
        code="invalid_budget",
    )


def _network(host: str) -> str:
    """Return an IPv4 address, or the /64 network of an IPv6 one, which usually is one client."""
    try:
        # After % comes this machine's name for the interface.
        address: IPv4Address | IPv6Address = ip_address(host.partition("%")[0])
    except ValueError:
        return host if host.isprintable() and 0 < len(host) <= 64 else "unknown"
    address = getattr(address, "ipv4_mapped", None) or address
    if isinstance(address, IPv4Address):
        return str(address)
    return str(IPv6Network((address, 64), strict=False))
