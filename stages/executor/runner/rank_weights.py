"""Groups of trainers in which each rank of a model is a member, and receives for itself."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from threading import Lock

import msgspec
import torch
import xxhash
from torch import Tensor

from ....bus.control import JoinWeightsGroup
from ....bus.weights import GroupWeights
from ....config import WeightsError, shown
from .ranks.calls import (
    CallReply,
    DropParts,
    JoinGroup,
    LeaveGroup,
    Numbered,
    ReadParts,
    ReceiveParts,
)
from .ranks.commands import NewWeights
from .ranks.processes import Ranks
from .ranks.rank_error import RankError
from .shards import Held, NewShard, NewWeight, Receipt, Shard, ShardedWeights, product
from .weights.checks import DELTA_HEAD, UNLIMITED, WeightLimits, digest_of
from .weights.parts import PartsTaker
from .weights.transports.background import Background, stay_single
from .weights.transports.group import CPU, WeightGroups, was_left
from .weights.transports.layout import as_bytes

_PIECE_BYTES = 1 << 26
"""Bytes of a whole tensor that are sent at a time, if one of its rows is not larger."""

_READ_S = 60.0
"""Time limit for a rank to read its parts of a tensor."""

_CONSEQUENCES = ("weights_interrupted", "weights_timeout")
"""Codes of errors that one rank gets because another one has failed."""


class LeaderGroups(WeightGroups):
    """Rank 0's groups. The other ranks are members too, under the ranks after its own.

    They are left by all ranks or by none: after any error of one rank all leave.
    """

    def __init__(self, ranks: Ranks, shards: ShardedWeights) -> None:
        super().__init__()
        # The memory of a closed executor is freed even while this object lives.
        self._ranks, self._shards = ranks, weakref.ref(shards)
        self._numbers = count(1)

    def _others_join(self, wish: JoinWeightsGroup) -> Callable[[float], None]:
        last = wish.rank + self._ranks.size - 1
        if last >= wish.world_size:
            raise WeightsError(
                f"the model's {self._ranks.size} ranks are {wish.rank} to {last} of the group, and "
                f"world_size is {shown(wish.world_size)}; count each of them"
            )
        number = self._start(JoinGroup(wish))
        return lambda deadline: _raise_first(self._replies(number, deadline))

    def _others_leave(self, name: str) -> None:
        with suppress(RankError):  # all ranks end
            self._ranks.calls.start(LeaveGroup(name))

    def receive(
        self, source: GroupWeights, timeout_s: float, limits: WeightLimits = UNLIMITED
    ) -> Mapping[str, NewWeight]:
        """Receive new weights (`WeightGroups.receive`); each rank holds its parts.

        Raises:
            WeightsError: As there, on any rank; the weights don't fit the model, or are not finite;
                or ranks have received different bytes.
        """
        if (shards := self._shards()) is None:
            raise was_left()
        receipt = Receipt(next(self._numbers), shards.layout)
        names = [meta.name for meta in source.tensors]
        taker = _taker(shards, names, receipt, checks=True)
        weakref.finalize(receipt, self._ranks.calls.drop, receipt.number).atexit = False
        deadline = time.monotonic() + timeout_s
        number = self._start(ReceiveParts(receipt.number, source, timeout_s, *limits))
        failure: WeightsError | None = None
        try:
            self.receive_each(source, timeout_s, limits, taker.take)
        except WeightsError as error:
            failure = error
            self._others_leave(source.group)
        replies = self._replies(number, deadline)
        own = CallReply(0, checksum=taker.checksum)
        if failure is not None:
            own = CallReply(0, failure.message, failure.code)
        try:
            _raise_first([own, *replies])
            if any(reply.checksum != own.checksum for reply in replies):
                raise WeightsError(
                    "ranks have received different bytes from the group; join a new one, and send "
                    "all again",
                    code="weights_interrupted",
                )
        except WeightsError:
            self.leave(source.group)
            raise
        return taker.parts()

    def _start(self, call: JoinGroup | ReceiveParts) -> int:
        try:
            return self._ranks.calls.start(call)
        except RankError as error:
            raise _of_rank(error) from error

    def _replies(self, number: int, deadline: float) -> list[CallReply]:
        try:
            return self._ranks.calls.replies(number, deadline)
        except RankError as error:
            raise _of_rank(error) from error


def _of_rank(error: RankError) -> WeightsError:
    return WeightsError(
        f"a rank of the model has failed: {error}",
        code="weights_interrupted",
        remedy="send them again when the executor has restarted",
    )


def _raise_first(replies: list[CallReply]) -> None:
    """Raise the error of the first rank that has one of its own, or else the first error."""
    failed = [reply for reply in replies if reply.error]
    own = [reply for reply in failed if reply.code not in _CONSEQUENCES]
    for reply in own or failed:
        raise WeightsError(reply.error, code=reply.code)


class RankReceiver:
    """Another rank's groups, and the parts that it holds. Calls run beside its commands."""

    def __init__(self, rank: int, connection: Connection, shards: ShardedWeights) -> None:
        self._rank, self._connection, self._shards = rank, connection, shards
        self._groups = WeightGroups()
        self._receiving = Background("weights", stay_single)
        self._held: dict[int, dict[str, tuple[Held, ...]]] = {}
        self._lock = Lock()

    def serve(self) -> None:
        """Begin calls as they come, until the connection is closed."""
        decoder = msgspec.msgpack.Decoder(Numbered)
        while True:
            try:
                numbered = decoder.decode(self._connection.recv_bytes())
            except (EOFError, OSError):
                return
            self._begin(numbered)

    def write(self, held: tuple[tuple[str, int], ...]) -> None:
        """Put parts in place that are held, and hold them no longer.

        Raises:
            RankError: They are not held.
        """
        try:
            parts = {name: self._held[receipt][name] for name, receipt in held}
        except KeyError:
            raise RankError(
                f"rank {self._rank} does not hold the weights to put in place"
            ) from None
        self._shards.write_parts(parts)
        for receipt in {receipt for _, receipt in held}:
            self._held.pop(receipt, None)

    def _begin(self, numbered: Numbered) -> None:
        number = numbered.number
        match numbered.call:
            case JoinGroup(wish):
                own = msgspec.structs.replace(wish, rank=wish.rank + self._rank)
                try:
                    future = self._groups.join(own, CPU)
                except WeightsError as error:
                    self._reply(CallReply(number, error.message, error.code))
                else:
                    future.add_done_callback(partial(self._done, number))
            case LeaveGroup(group):
                self._groups.leave(group)
            case ReceiveParts() as call:
                receiving = self._receiving.submit(self._receive, call)
                receiving.add_done_callback(partial(self._done, number))
            case ReadParts(name):
                reading = self._receiving.submit(self._read, number, name)
                reading.add_done_callback(partial(self._read_done, number))
            case DropParts(receipts):
                # After what is being received.
                for receipt in receipts:
                    self._receiving.submit(self._held.pop, receipt, None)

    def _receive(self, call: ReceiveParts) -> int:
        receipt = Receipt(call.receipt, self._shards.layout)
        names = [meta.name for meta in call.source.tensors]
        taker = _taker(self._shards, names, receipt, checks=False)
        limits = WeightLimits(call.most_tensors, call.most_bytes)
        self._groups.receive_each(call.source, call.timeout_s, limits, taker.take)
        if taker.error is None:
            self._held[call.receipt] = {
                name: each.parts
                for name, each in taker.parts().items()
                if isinstance(each, NewShard)
            }
        # Rank 0 finds the same errors.
        return taker.checksum

    def _read(self, number: int, name: str) -> CallReply:
        boxes = self._shards.shards[name].boxes()
        parts = (
            (tuple((each.start, each.stop) for each in box.place), as_bytes(box.read()).numpy())
            for box in boxes
        )
        return CallReply(number, parts=tuple((place, data.tobytes()) for place, data in parts))

    def _read_done(self, number: int, future: Future[CallReply]) -> None:
        if future.exception() is None:
            self._reply(future.result())
        else:
            self._failed(number, future.exception())

    def _done(self, number: int, future: Future[int] | Future[None]) -> None:
        error = future.exception()
        if error is None:
            self._reply(CallReply(number, checksum=future.result() or 0))
        else:
            self._failed(number, error)

    def _failed(self, number: int, error: BaseException | None) -> None:
        if isinstance(error, WeightsError):
            self._reply(CallReply(number, error.message, error.code))
        else:
            message = f"rank {self._rank}: {type(error).__name__}: {shown(str(error))}"
            self._reply(CallReply(number, message, "weights_interrupted"))

    def _reply(self, reply: CallReply) -> None:
        with self._lock, suppress(OSError):  # rank 0 has closed it, and this rank ends
            self._connection.send_bytes(msgspec.msgpack.encode(reply))


class _DeltaTaker:
    """Keeps the tensors of a delta, which rank 0 compares with the weights in place.

    The attributes and methods are those of `PartsTaker`.
    """

    error = None

    def __init__(self) -> None:
        self._checksum = xxhash.xxh3_64()
        self._tensors: dict[str, NewWeight] = {}

    @property
    def checksum(self) -> int:
        return self._checksum.intdigest()

    def take(self, name: str, tensor: Tensor) -> None:
        self._checksum.update(f"{name} {digest_of(tensor)} ".encode())
        self._tensors[name] = tensor

    def parts(self) -> dict[str, NewWeight]:
        return self._tensors


def _taker(
    shards: ShardedWeights, names: Sequence[str], receipt: Receipt, *, checks: bool
) -> PartsTaker | _DeltaTaker:
    if DELTA_HEAD in names:
        return _DeltaTaker()
    return PartsTaker(shards, names, receipt, checks=checks)


def write_to_ranks(
    ranks: Ranks, shards: ShardedWeights, new_weights: Mapping[str, NewWeight]
) -> None:
    """Put new weights in place on all ranks, each of which takes its parts.

    Raises:
        RankError: A rank has failed. The weights may be a mixture then.
    """
    received = {name: each for name, each in new_weights.items() if isinstance(each, NewShard)}
    whole = {name: each for name, each in new_weights.items() if not isinstance(each, NewShard)}
    held = tuple((name, each.receipt.number) for name, each in received.items())
    ranks.tell(NewWeights(held))
    write_everywhere(shards, ranks.group.broadcast, whole)
    shards.write_parts({name: each.parts for name, each in received.items()})


def read_from_ranks(ranks: Ranks, shards: ShardedWeights, name: str) -> Tensor:
    """Return a whole tensor in place, put together of the parts of all ranks.

    Raises:
        WeightsError: A rank has failed.
    """
    try:
        number = ranks.calls.start(ReadParts(name))
        whole = shards.read_one(name)
        replies = ranks.calls.replies(number, time.monotonic() + _READ_S)
    except RankError as error:
        raise _of_rank(error) from error
    _raise_first(replies)
    for reply in replies:
        for place, data in reply.parts:
            bounds = tuple(slice(*each) for each in place)
            part = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(whole.dtype)
            whole[bounds] = part.view(whole[bounds].shape)
    return whole


def write_everywhere(
    shards: ShardedWeights,
    broadcast: Callable[[Tensor], None],
    tensors: Mapping[str, Tensor] | None,
) -> None:
    """Send whole tensors from rank 0 to all ranks, each of which keeps its parts.

    They are sent in pieces, so that another rank needs memory for one piece more. All ranks
    call this between the same two steps.

    Args:
        shards: Places of the tensors on this rank.
        broadcast: `RankGroup.broadcast`.
        tensors: On rank 0 by name; None on others.

    Raises:
        RankError: A rank has failed. The weights may be a mixture then.
    """
    names = sorted(shards.shards)
    chosen = torch.zeros(len(names), dtype=torch.uint8)
    if tensors is not None:
        chosen = torch.tensor([name in tensors for name in names], dtype=torch.uint8)
    broadcast(chosen)
    for name, is_sent in zip(names, chosen.tolist(), strict=True):
        if is_sent:
            _send(broadcast, shards.shards[name], None if tensors is None else tensors[name])


def _send(broadcast: Callable[[Tensor], None], shard: Shard, tensor: Tensor | None) -> None:
    # A number without dimensions is sent as one row.
    shape = shard.shape or (1,)
    row_bytes = max(shard.dtype.itemsize * product(shape[1:]), 1)
    count = max(_PIECE_BYTES // row_bytes, 1)
    for start in range(0, shape[0], count):
        stop = min(start + count, shape[0])
        piece = torch.empty((stop - start, *shape[1:]), dtype=shard.dtype)
        if tensor is not None:
            piece.copy_(tensor.view(shape)[start:stop] if not shard.shape else tensor[start:stop])
        broadcast(piece)
        if shard.shape:
            shard.write_rows(piece, start)
        else:
            shard.write(piece[0])
