"""The contract of every bus: links between stages, the requests queue, result streams.

Every implementation passes the suite in `tests/bus/`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol, Self, TypeVar

from ..store.store import Store
from .backlog import Backlog
from .dead_letters import DeadLetter
from .entries import Answer, RequestEntry
from .envelope import Envelope
from .kv_events import KVEventEntry
from .links import AnyLink
from .public import AnyRequest, Completion, ErrorInfo, Output, OutputBatch
from .replies import Replies
from .routing import RequestRouting
from .sender import Sender
from .shards import Layout

T_co = TypeVar("T_co", covariant=True)


class Inbox(Protocol):
    """All links that end at a stage, merged into one queue."""

    def __len__(self) -> int:
        """Return the number of messages that are here and not yet received."""

    async def receive(self, max_items: int = 64) -> list[Envelope]:
        """Wait for messages and return up to `max_items`, oldest first.

        Cancelling the wait loses nothing.

        Raises:
            ChannelClosed: The bus was closed, and all messages are received.
        """


class RequestQueue(Protocol):
    """The requests stream: durable on Redis, in memory for the process's life.

    A taken entry belongs to a lane until it is acknowledged. After a failure the lane finds its
    entries in `pending`. On Redis entries are leased: another lane takes over those not renewed in
    time.
    """

    async def publish(
        self, request: AnyRequest, *, traceparent: str = "", tracestate: str = ""
    ) -> str:
        """Add a request (a struct, an equivalent dict, or its JSON).

        Nothing is refused here: an invalid request gets a terminal message. In memory it waits
        while `link_capacity` entries are untaken.

        Returns:
            The entry's id.

        Raises:
            ChannelClosed: The bus was closed.
            BusError: The transport did not confirm the entry; it may be in the queue.
        """

    async def pending(self) -> list[RequestEntry]:
        """Return entries taken and not acknowledged, oldest first. Call it before the first `take`.

        The caller becomes the holder of the lane's entries: a previous holder, in a process that
        has started before, gets LaneReplaced from `renew`.

        Raises:
            LaneReplaced: A process that has started later holds them.
        """

    async def take(self, max_items: int = 64) -> list[RequestEntry]:
        """Wait for entries and take up to `max_items`. Cancelling the wait loses nothing.

        Raises:
            ChannelClosed: The bus was closed.
        """

    async def acknowledge(self, entry_id: str, request_id: str | None = None) -> None:
        """Forget an entry whose terminal message is written. Unknown ids are ignored.

        An entry that another lane has taken over is left to that lane.

        Args:
            request_id: Request id of the terminal message that `deliver` wrote. If the transport
                lost the message, `take` returns the entry again. None: no check, for any request
                id.
        """

    async def renew(self, lease_s: float) -> set[str]:
        """Renew the lease of all entries in hand, and register the lane as live (`Bus.lanes`).

        Never takes back entries that another lane has taken over. Waits while the transport is
        unreachable.

        Args:
            lease_s: Seconds until other lanes may consider this one dead.

        Returns:
            Keys of entries in hand (`RequestEntry.key`) that no longer belong to this lane; they
            are forgotten here.

        Raises:
            LaneReplaced: Another process has called `pending` for this lane.
            ChannelClosed: The bus was closed.
        """

    def mark_possibly_lost(self) -> None:
        """Mark the entries in hand as possibly lost by a restarted server.

        An entry that the server no longer has then still belongs to this lane, unless another lane
        has it.
        """

    async def take_over(self, lease_s: float, max_items: int) -> list[RequestEntry]:
        """Take entries whose lease is older than `lease_s`, oldest first, without waiting.

        Call it right after `renew`. In memory there are none.

        Raises:
            ChannelClosed: The bus was closed.
        """

    async def shed(
        self, max_queued: int, answer: Callable[[RequestEntry, int], Completion], epoch: int
    ) -> int:
        """Refuse untaken entries beyond `max_queued`.

        Repeatedly refuses the newest entry of the tenant with most waiting. Removing an entry and
        writing its terminal message is atomic, so it is answered exactly once. In memory this does
        nothing: `publish` waits instead.

        Args:
            answer: Makes an entry's terminal message, from the entry and the number of waiting
                ones.
            epoch: The writer's.

        Returns:
            The number of refused entries. If it isn't 0, there may still be too many.

        Raises:
            ChannelClosed: The bus was closed.
        """

    async def end_all(self, answer: Answer, epoch: int) -> int:
        """End every entry, taken or not, of a model without lanes.

        Later output of dead lanes is dropped. An entry that a lane processes in a larger epoch is
        left to it.

        Args:
            answer: Makes an entry's terminal message.
            epoch: The writer's, the newest.

        Returns:
            The number of ended entries. Raises as `shed`, and BusError as `backlog`.
        """

    async def add_dead_letter(self, entry: RequestEntry, error: ErrorInfo, deaths: int) -> None:
        """Move a request to the dead letters. A retry may store it twice.

        Raises:
            ChannelClosed: The bus was closed.
        """

    async def dead_letters(self) -> list[DeadLetter]:
        """Return all dead letters, oldest first. Raises BusError as `backlog`."""

    async def count_queue(self, begun: int | None) -> int:
        """Update `Backlog.queue_length`. Every process of a pipeline calls it.

        Args:
            begun: This lane's begun and unanswered requests, valid for five seconds; None if
                unknown.

        Raises:
            BusError: The transport can't be reached.
        """

    async def backlog(self) -> Backlog:
        """Return the numbers of entries. For display: they may be out of date.

        Raises:
            BusError: The transport can't be reached.
        """

    async def shards(self) -> Layout:
        """Return the shards of the queue. Raises BusError as `backlog`."""

    async def shard_lengths(self) -> list[int]:
        """Return the number of entries on each shard. Raises BusError as `backlog`."""

    async def set_shards(self, shards: int) -> Layout:
        """Begin to change the number of shards; lanes end the change, in seconds.

        Nothing is lost, doubled, or out of order within a tenant. In memory there is one.

        Returns:
            The layout; `moving` is false if the change has ended, or nothing changed.

        Raises:
            ConfigError: The number is out of its range.
            BusError: "shards_in_memory"; "shards_of_models" in a deployment of several models;
                "shards_moving" during another change; or as `backlog`.
        """

    async def drop_dead_letter(self, letter_id: str) -> bool:
        """Remove a dead letter; return whether it existed. Raises BusError as `backlog`."""


class OutputStream(Protocol[T_co]):
    """Result of `follow` and `tail`: an async iterator; call `aclose` when leaving it early."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> T_co: ...

    async def aclose(self) -> None: ...


class EndedStream(OutputStream[Completion], Protocol):
    """Result of `ended`."""

    @property
    def position(self) -> str:
        """The position after the last message that was returned."""


class ResultStreams(Protocol):
    """Result streams: one per request, and one with every terminal message."""

    async def deliver(self, batch: OutputBatch, epoch: int = 1) -> set[str]:
        """Append outputs to their requests' streams; return once all are written.

        One call costs about one round trip. Outputs after a terminal message are dropped, and so
        are outputs to a stream that was recovered in a larger epoch, and the end of a stream with
        lost outputs. Waits and retries while the transport is unreachable. Calls take effect in
        order; cancelling one does not undo it.

        Args:
            batch: Pairs of a stream's key and its new outputs, in order; the last may be the
                terminal message. The key is the request's id, or the entry's id if the request's
                can't be used (a duplicate, or unreadable).
            epoch: The writer's.

        Returns:
            Keys of streams whose outputs were dropped because they belong to a larger epoch, or
            have to be recovered because of lost outputs.

        Raises:
            ChannelClosed: The bus was closed.
        """

    async def recover(self, keys: Sequence[str], epoch: int) -> list[list[Output]]:
        """Return the contents of these streams, to continue them in `epoch`.

        From then on nothing of an older epoch is written to them, even by a stage wrongly
        considered dead.

        Raises:
            ChannelClosed: The bus was closed.
        """

    async def claim(self, claims: Sequence[tuple[str, str]]) -> list[str | None]:
        """Claim result streams for entries, by (key, entry id), in one round trip.

        The first entry to claim a key owns it until its outputs expire; later claims fail. A key
        equal to the entry's id (of a request without an id) can't be claimed by another entry.

        Returns:
            For each pair, the previous owner: None if the claim succeeded; the entry's own id if it
            was claimed before; else another entry's id.

        Raises:
            ChannelClosed: The bus was closed.
        """

    def follow(
        self, request_id: str, entry_id: str, *, just_published: bool = False, keep: bool = False
    ) -> OutputStream[Output]:
        """Return the outputs of the request published as `entry_id`, ending with its Completion.

        Starts with the first output. If `entry_id` is "", follows the present or next request with
        `request_id`. In memory the outputs are forgotten once followed to the end.

        Args:
            just_published: The entry is known to exist, so it isn't looked up.
            keep: In memory, keep the outputs readable, up to a limit.

        Raises (while iterating):
            BusError: Code "unknown_request": the entry is neither in the queue nor in flight, and
                its outputs have expired. Code "malformed_output": the stream holds a foreign entry.
            ChannelClosed: The bus was closed.
        """

    async def last(self, request_id: str, entry_id: str) -> Output | None:
        """Return a request's last output without waiting.

        The arguments are those of `follow`. In memory it exists as long as it could be followed.

        Returns:
            None if there is none yet, or, if `entry_id` is "", no such request.

        Raises:
            BusError: As `follow`, or the transport can't be reached.
            ChannelClosed: The bus was closed.
        """

    async def tail(self) -> OutputStream[Completion]:
        """Return every request's terminal message from now on.

        A slow reader misses the oldest ones: in memory beyond `TAIL_CAPACITY`, on Redis beyond
        `results_maxlen`.
        """

    async def ended(self, after: str = "") -> EndedStream:
        """Return every request's terminal message after a position, and miss none.

        Args:
            after: A `position` of such a stream; "" for now.

        Raises:
            RequestError: invalid_position.
            BusError: Also while iterating: results_lost: some are no longer there. On Redis the
                last `results_maxlen` are kept, in memory those that `recorded` has.
            ChannelClosed: The bus was closed.
        """

    def newest(self, within_s: float) -> AsyncIterator[Completion]:
        """Return the terminal messages of the last `within_s` seconds before the newest one, oldest
        first.

        Includes the newest. In memory those that `recorded` has.

        Raises (while iterating):
            BusError: The server refuses the query.
        """

    async def recorded(self, id: str, *, search: bool = True) -> list[Completion]:
        """Return the terminal messages that are stored under an id, oldest first.

        In memory the latest `KEPT_RECORDS` are, of `KEPT_RECORD_TOKENS` together.

        Args:
            id: Id of a request, or of a call over HTTP, whose requests are `ID_0`, `ID_1` and so
                on.
            search: On Redis, read the shared results stream if nothing has the id, also for the id
                of an entry or a trace.

        Raises:
            BusError: The transport can't be reached. "malformed_output": as `follow`.
            ChannelClosed: The bus was closed.
        """


class KVEventStream(Protocol):
    """The stream of KV events, of all replicas of the deployment. Not durable."""

    async def publish(self, entry: KVEventEntry) -> bool:
        """Append an entry, without waiting for the transport or any reader.

        The stream keeps about the last `kv_events_maxlen` entries.

        Returns:
            False if the entry was dropped, because too many wait to be written.

        Raises:
            ChannelClosed: The bus was closed.
        """

    async def follow(self, *, kept: bool = False) -> OutputStream[KVEventEntry]:
        """Return the entries from now on; of one model if the bus is of one.

        A slow reader misses the oldest ones (`missed`).

        Args:
            kept: Begin with the oldest entry that the stream keeps.

        Raises:
            ChannelClosed: The bus was closed.
        """


class Bus(Protocol):
    """One transport with all of its ends. Close it last."""

    @property
    def requests(self) -> RequestQueue:
        """The requests stream."""

    @property
    def results(self) -> ResultStreams:
        """The result streams."""

    @property
    def replies(self) -> Replies:
        """Replies to control messages."""

    @property
    def kv_events(self) -> KVEventStream:
        """The stream of KV events."""

    @property
    def store(self) -> Store:
        """Shared state beside messages."""

    @property
    def routing(self) -> RequestRouting:
        """Routing of a deployment of several models; in memory there is one model.

        Raises:
            BusError: The bus is in memory.
        """

    @property
    def model(self) -> str:
        """The model of this bus in a deployment; "" for all models, or for the only one."""

    def of_model(self, model: str) -> Bus:
        """Return a bus for one model of the deployment: its requests stream, lanes and board.

        Everything else is the deployment's. The caller closes it. In memory there is one model.
        """

    async def open_inbox(self, stage: str) -> Inbox:
        """Open the inbox of a stage in this process, for messages sent from now on.

        Opening it again (after a stage's failure) returns a new, empty inbox and closes the old
        one; waiting senders continue with the new one.
        """

    def sender(self, link: AnyLink, sender: str, lane: str | None = None) -> Sender:
        """Return the sending end of a link for the incarnation `sender`; by default of this lane's
        link."""

    async def lanes(self) -> list[str]:
        """Return the live lanes by their leases; the configured one if none is live.

        Waits while the transport is unreachable.

        Raises:
            ChannelClosed: The bus was closed.
        """

    async def next_epoch(self) -> int:
        """Return a number, at least 1, larger than any returned before in any process."""

    async def is_epoch(self, number: int) -> bool:
        """Return whether `next_epoch` can have returned this number.

        A stage checks it before it follows a message into a larger epoch: after a number from a
        damaged message, the stage would drop all later messages as stale.
        """

    async def is_newest(self, stage: str) -> bool:
        """Return whether no process that has started later has opened this stage's inbox.

        A stage checks it with each larger epoch. A process that was cut off or stopped while a
        successor started would otherwise take part in the successor's epoch, beside it.
        """

    @property
    def durable(self) -> bool:
        """Whether the bus is shared with other processes and outlives this one."""

    @property
    def reconnects(self) -> int:
        """Reconnections after transport failures, as noticed by this process."""

    async def ping(self) -> None:
        """Return once the bus is reachable.

        Raises:
            BusError: It isn't; the message says what to do.
        """

    async def aclose(self) -> None:
        """Send buffered messages, then close all ends."""
