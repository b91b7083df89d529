"""The contract that every bus keeps: links between stages, the requests queue, the result streams.

`tests/bus/` holds one suite that each implementation passes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol, Self, TypeVar

import msgspec

from ..store.store import Store
from .backlog import Backlog
from .dead_letters import DeadLetter
from .links import AnyLink
from .messages import Envelope, Message
from .public import Completion, ErrorInfo, GenerateRequest, Output
from .replies import Replies
from .routing import RequestRouting

T_co = TypeVar("T_co", covariant=True)


class Malformed(msgspec.Struct, frozen=True):
    """A request that could not be read, in place of the request.

    Attributes:
        request_id: The client's id when at least that could be read, else "".
        code: "malformed", "invalid_request" or "request_too_large".
        message: What is wrong, and where.
    """

    request_id: str
    code: str
    message: str


class RequestEntry(msgspec.Struct, frozen=True):
    """One entry of the requests queue, with the trace context that its client gave.

    Attributes:
        waited_ns: How long it was in the queue, by the queue's own clock; told only of requests
            that have a budget.
        model: What the entry says beside its request, whose model is what the request says.
    """

    entry_id: str
    request: GenerateRequest | Malformed
    traceparent: str = ""
    tracestate: str = ""
    waited_ns: int = 0
    model: str = ""

    @property
    def budget_ns(self) -> int | None:
        """The request's budget in nanoseconds; None when it has none or can't be read."""
        return budget_of(self.request)


def budget_of(request: GenerateRequest | Malformed) -> int | None:
    """A request's budget in nanoseconds; None when it has none or could not be read."""
    return None if isinstance(request, Malformed) else request.budget_ns


class Sender(Protocol):
    """The sending end of a link, owned by one stage.

    It fills in the envelope's sender, id and sent_ns. Messages of one sender arrive in the order
    sent, each once. What is sent to a stage whose inbox was never opened is lost.
    """

    async def send(
        self,
        body: Message,
        *,
        epoch: int = 0,
        traceparent: str = "",
        tracestate: str = "",
        budget_ns: int | None = None,
        operation_id: str = "",
    ) -> None:
        """Hands a message to the link; waits while the link is full.

        When the wait is cancelled, the message may or may not have been sent; never a part of it,
        and never twice.

        Raises:
            ChannelClosed: The bus was closed, or (when both ends are in this process) the
                receiving inbox was closed and not opened again.
            BusError: The message can't be carried (larger than the transport allows).
        """

    async def flush(self) -> None:
        """Waits until all that was sent has left this process (in memory: at once).

        Raises:
            ChannelClosed: The bus was closed before that.
        """


class Inbox(Protocol):
    """All links that end at a stage, merged into one line."""

    async def receive(self, max_items: int = 64) -> list[Envelope]:
        """Waits for messages and takes up to `max_items` of them, oldest first.

        Cancelling the wait loses nothing.

        Raises:
            ChannelClosed: The inbox was closed and all that it held has been taken.
        """

    async def aclose(self) -> None:
        """Takes no more messages; those already there can still be received."""


class RequestQueue(Protocol):
    """The requests stream: durable on Redis, and in memory for as long as the process lives.

    An entry that was taken belongs to its taker, which is a lane, until it is acknowledged. A
    taker that comes back after a failure finds what it had taken in `pending`. On Redis it is
    leased: what is not renewed in time, another lane takes over.
    """

    async def publish(
        self,
        request: GenerateRequest | dict[str, Any] | bytes,
        *,
        traceparent: str = "",
        tracestate: str = "",
    ) -> str:
        """Puts a request (a struct, the same as a dict, or its JSON) in the queue.

        Nothing is refused here: whatever is wrong with a request, its terminal message says so.
        In memory it waits while `link_capacity` entries wait to be taken.

        Returns:
            The entry's id.

        Raises:
            ChannelClosed: The bus was closed.
            BusError: The transport did not confirm the entry; it may be in the queue nevertheless.
        """

    async def pending(self) -> list[RequestEntry]:
        """Entries taken and not acknowledged, oldest first. To be called before the first take.

        Whoever calls it is from now on the one that holds the lane's entries: an older one in
        another process gets LaneReplaced from `renew`.
        """

    async def take(self, max_items: int = 64) -> list[RequestEntry]:
        """Waits for entries and takes up to `max_items`. Cancelling the wait loses nothing.

        Raises:
            ChannelClosed: The bus was closed.
        """

    async def acknowledge(self, entry_id: str, request_id: str | None = None) -> None:
        """The entry's terminal message is written; forget the entry. Unknown ids do nothing.

        An entry that another lane has taken over meanwhile is left to it.

        Args:
            request_id: Of its terminal message, which `deliver` wrote. Should the transport have
                lost that, `take` gives the entry once more. None: nobody looks.
        """

    async def renew(self, lease_s: float) -> set[str]:
        """Renews the lease of all entries in hand, and tells that the lane lives (`Bus.lanes`).

        Never takes back what another lane has taken over. While the transport is away it waits.

        Args:
            lease_s: Seconds until others may count the lane among the dead.

        Returns:
            The ids of entries that were in hand and belong to this lane no longer; they are
            forgotten here.

        Raises:
            LaneReplaced: Another process has called `pending` for this lane.
            ChannelClosed: The bus was closed.
        """

    def mark_possibly_lost(self) -> None:
        """Tells the queue that the server was restarted and may have lost entries.

        An entry in hand that the server no longer knows then still counts as ours, unless another
        lane has it.
        """

    async def take_over(self, lease_s: float, max_items: int) -> list[RequestEntry]:
        """Takes entries whose lease was not renewed for `lease_s`, oldest first; waits for none.

        To be called right after `renew`. In memory there are none.

        Raises:
            ChannelClosed: The bus was closed.
        """

    async def shed(
        self, max_queued: int, answer: Callable[[RequestEntry, int], Completion], epoch: int
    ) -> int:
        """Refuses some of the entries that nobody has taken, if more than `max_queued` wait.

        It refuses the newest entry of the tenant that has most waiting, then looks again who has
        most. To refuse one is to remove it and write its terminal message in a single step, so
        that it is answered once and never lost. In memory `publish` waits instead, and this does
        nothing.

        Args:
            answer: Given an entry and how many wait, its terminal message.
            epoch: The writer's.

        Returns:
            How many were refused. When it is not 0, more may still be too many.

        Raises:
            ChannelClosed: The bus was closed.
        """

    async def end_all(self, answer: Callable[[RequestEntry], Completion], epoch: int) -> int:
        """Ends every entry, whether it was taken or not: nobody is there to work on them.

        What lanes that are gone still had to say is not written any more. An entry that somebody
        works on in a larger epoch is left to him.

        Args:
            answer: An entry's terminal message.
            epoch: The writer's, the newest.

        Returns:
            How many were ended. Raises as `shed`, and BusError as `backlog`.
        """

    async def add_dead_letter(self, entry: RequestEntry, error: ErrorInfo, deaths: int) -> None:
        """Keeps a request that is given up among the dead letters. It may be kept twice.

        Raises:
            ChannelClosed: The bus was closed.
        """

    async def dead_letters(self) -> list[DeadLetter]:
        """All dead letters, oldest first. Raises BusError as `backlog`."""

    async def count_queue(self, begun: int | None) -> int:
        """Brings `Backlog.queue_length` up to date. Every process of a pipeline calls it.

        Args:
            begun: How many requests of this lane have begun and are not answered, which counts for
                five seconds; None from a process that does not know.

        Raises:
            BusError: The transport can't be reached.
        """

    async def backlog(self) -> Backlog:
        """How many entries there are, of each kind. For people: it may be out of date.

        Raises:
            BusError: The transport can't be reached.
        """

    async def drop_dead_letter(self, letter_id: str) -> bool:
        """Removes a dead letter; returns whether it was there. Raises BusError as `backlog`."""


class OutputStream(Protocol[T_co]):
    """What `follow` and `tail` give: iterate over it; `aclose` it when leaving early."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> T_co: ...

    async def aclose(self) -> None: ...


class ResultStreams(Protocol):
    """Where completions go: one stream for each request, and one with every terminal message."""

    async def deliver(
        self, batch: Sequence[tuple[str, Sequence[Output]]], epoch: int = 1
    ) -> set[str]:
        """Appends outputs to the streams of their requests; returns once all of them are written.

        `batch` holds pairs of a stream's key and its new outputs in order, of which the last may
        be the terminal message. One call costs about one round trip, however many keys it has.
        The key is the request's id; for a request whose id can't be used (a duplicate, or
        none that could be read) it is the entry's id. What comes after a terminal message is
        dropped, so that a request never ends twice, and so is what comes for a stream that was
        recovered in a larger epoch, and the end of one of which the transport has lost outputs.
        While the transport is away it waits and tries again. Calls take effect in the order made;
        cancelling one does not undo it.

        Returns:
            The keys of which outputs were dropped because the stream belongs to a larger epoch, or
            has to be recovered since some are missing there.

        Raises:
            ChannelClosed: The bus was closed.
        """

    async def recover(self, keys: Sequence[str], epoch: int) -> list[list[Output]]:
        """What the streams of these keys hold, for whoever goes on with them in `epoch`.

        From then on nothing is written to them in an older epoch: what a predecessor that was
        only thought dead still had to say can't come between.

        Raises:
            ChannelClosed: The bus was closed.
        """

    async def claim(self, claims: Sequence[tuple[str, str]]) -> list[str | None]:
        """Claims result streams: for each (key, entry id), the stream is to be the entry's.

        The first entry to claim a key owns it until its outputs are no longer readable; later
        claims by others fail. Where the key is the entry's id, since the request named none,
        nobody else can have it. It takes one round trip for all pairs.

        Returns:
            For each pair, who had the key before: None if nobody, so that the claim succeeded; the
            entry's own id if somebody has worked on this entry before; else another entry's id.

        Raises:
            ChannelClosed: The bus was closed.
        """

    def follow(
        self, request_id: str, entry_id: str, *, just_published: bool = False, keep: bool = False
    ) -> OutputStream[Output]:
        """The outputs of the request that was published as `entry_id`, ending with its Completion.

        It starts with the first output, however late it is called. If `entry_id` is "", it
        follows whichever request has `request_id`, or will have it. In memory the outputs are
        forgotten once they have been followed to the end.

        Args:
            just_published: The caller knows that there is such an entry, so nobody need look.
            keep: In memory too they stay readable, as long as there are not too many.

        Raises (while iterating):
            BusError: Code "unknown_request": the entry is neither in the queue nor in flight, and
                its outputs are no longer readable. Code "malformed_output": something that is
                not an output stands in the stream.
            ChannelClosed: The bus was closed.
        """

    async def last(self, request_id: str, entry_id: str) -> Output | None:
        """The last output that there is of a request, without waiting for any.

        The arguments are those of `follow`. In memory it is there as long as it could be followed.

        Returns:
            None when there is none yet; or, if `entry_id` is "", no such request.

        Raises:
            BusError: As `follow`, or the transport can't be reached.
            ChannelClosed: The bus was closed.
        """

    async def tail(self) -> OutputStream[Completion]:
        """Every request's terminal message, from now (when this returns) on.

        A reader that falls far behind misses the oldest ones: in memory more than
        `TAIL_CAPACITY` behind, on Redis more than `results_maxlen`.
        """

    def newest(self, within_s: float) -> AsyncIterator[Completion]:
        """The terminal messages of the last `within_s` seconds before the newest one, oldest first.

        The newest is among them. In memory only those of requests that nobody has followed to the
        end are still there.

        Raises (while iterating):
            BusError: The server refuses to be asked.
        """


class Bus(Protocol):
    """One transport with all of its ends. Close it last."""

    @property
    def requests(self) -> RequestQueue:
        """The requests stream."""

    @property
    def results(self) -> ResultStreams:
        """Where completions go."""

    @property
    def replies(self) -> Replies:
        """Answers to control messages."""

    @property
    def store(self) -> Store:
        """Shared state that is no message."""

    @property
    def routing(self) -> RequestRouting:
        """The entrance of a deployment of several models."""

    @property
    def model(self) -> str:
        """Of which model of the deployment this is the bus; "" of all, or of the only one."""

    def of_model(self, model: str) -> Bus:
        """A bus of its own to a model of the deployment: its requests stream, its lanes, its board.

        All else is the deployment's. Whoever asks for it closes it. In memory there is one model.
        """

    async def open_inbox(self, stage: str) -> Inbox:
        """The inbox of a stage that runs in this process.

        It sees what is sent from now on. Opening it again (after a stage failed) gives a new,
        empty inbox and closes the old one; waiting senders go on with the new one.
        """

    def sender(self, link: AnyLink, sender: str, lane: str | None = None) -> Sender:
        """The sending end of a link for the incarnation `sender`; of this lane's, by default."""

    async def lanes(self) -> list[str]:
        """The lanes that live, by the leases that they renew; the configured one if none does.

        While the transport is away it waits.

        Raises:
            ChannelClosed: The bus was closed.
        """

    async def next_epoch(self) -> int:
        """A number, at least 1, larger than any that was given before in any process."""

    async def is_epoch(self, number: int) -> bool:
        """Whether `next_epoch` can have given this number.

        Asked before a stage follows a message into a larger epoch. If the number were not an
        epoch's but came from a damaged message, the stage would drop all later messages as old.
        """

    @property
    def durable(self) -> bool:
        """Whether other processes share what is in it, and find it when this one has ended."""

    @property
    def reconnects(self) -> int:
        """How often the transport was away and came back, as far as this process noticed."""

    async def ping(self) -> None:
        """Returns when the bus can be reached.

        Raises:
            BusError: It can't; the message says what to do.
        """

    async def aclose(self) -> None:
        """Sends what is buffered, then closes all ends."""
