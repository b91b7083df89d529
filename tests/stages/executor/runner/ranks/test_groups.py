"""Ranks that exchange tensors through shared memory."""

from __future__ import annotations

import fcntl
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from nano_inference.stages.executor.runner.kernels import compile as compile_module
from nano_inference.stages.executor.runner.ranks import shared_memory
from nano_inference.stages.executor.runner.ranks.group import OneRank, RankGroup, sum_pairwise
from nano_inference.stages.executor.runner.ranks.rank_error import RankError
from nano_inference.stages.executor.runner.ranks.shared_memory import SharedMemoryGroup

T = TypeVar("T")

SLOT = 4096
DTYPES = (torch.float32, torch.bfloat16)

# For what should come soon; only a failing test takes so long.
BOUND_S = 20.0


class Ranks:
    """All ranks of a group, each in a thread of this process."""

    def __init__(self, size: int) -> None:
        self._threads = ThreadPoolExecutor(size)
        first = SharedMemoryGroup.create(size, SLOT)
        others = range(1, size)
        attached = [SharedMemoryGroup.attach(first.descriptor, rank) for rank in others]
        self.groups: list[RankGroup] = [first, *attached]

    def each(self, run: Callable[[RankGroup], T], ranks: Sequence[int] | None = None) -> list[T]:
        """Return the results of a function on ranks at the same time."""
        chosen = self.groups if ranks is None else [self.groups[rank] for rank in ranks]
        started = [self._threads.submit(run, group) for group in chosen]
        return [each.result(60) for each in started]

    def errors(self, run: Callable[[RankGroup], Any], ranks: Sequence[int] | None) -> list[str]:
        """Return each rank's RankError."""

        def error(group: RankGroup) -> str:
            with pytest.raises(RankError) as raised:
                run(group)
            return str(raised.value)

        return self.each(error, ranks)

    def start(self, run: Callable[[RankGroup], T], rank: int) -> Any:
        return self._threads.submit(run, self.groups[rank])

    def close(self) -> None:
        for group in self.groups:
            group.close()
        self._threads.shutdown()


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with closing(Ranks(request.param)) as ranks:
        yield ranks


@pytest.fixture
def pair() -> Iterator[Ranks]:
    with closing(Ranks(2)) as ranks:
        yield ranks


def parts_of(size: int, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Return a tensor per rank, with numbers of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-20, 20, (size, *shape), generator=generator).float().exp2()
    return [*(torch.randn((size, *shape), generator=generator) * exponents).to(dtype)]


SHAPES = [(), (0,), (3, 0, 5), (1,), (7,), (33, 31), (1, 896), (SLOT // 4,), (5, 1, 3001)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_rank_has_the_bits_of_the_pairwise_sum(
    ranks: Ranks, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    parts = parts_of(len(ranks.groups), shape, dtype)
    for result in ranks.each(lambda group: group.all_reduce(parts[group.rank])):
        assert (result.shape, result.dtype) == (shape, dtype)
        assert torch.equal(result, sum_pairwise(parts))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_of_ranks_sums_is_the_sum_of_all_parts(pair: Ranks, dtype: torch.dtype) -> None:
    parts = parts_of(4, (50, 70), dtype)
    halves = [sum_pairwise(parts[:2]), sum_pairwise(parts[2:])]
    for result in pair.each(lambda group: group.all_reduce(halves[group.rank])):
        assert torch.equal(result, sum_pairwise(parts))
    left_to_right = parts[0] + parts[1] + parts[2] + parts[3]
    assert not torch.equal(result, left_to_right)  # so the order can be seen


@pytest.mark.parametrize("size", [1, 3, 5])
def test_any_number_of_ranks_adds_in_the_same_order(size: int) -> None:
    with closing(Ranks(size)) as ranks:
        for dtype in DTYPES:
            parts = parts_of(size, (3, 700), dtype)
            for result in ranks.each(
                lambda group, parts=parts: group.all_reduce(parts[group.rank])
            ):
                assert torch.equal(result, sum_pairwise(parts))


def test_bfloat16_rounds_to_nearest_even_and_keeps_nan_and_infinity(pair: Ranks) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    for shift in (0, 1, 127, 128, 32768):
        parts = [every, every.roll(shift)]
        for result in pair.each(lambda group, parts=parts: group.all_reduce(parts[group.rank])):
            assert torch.equal(result.isnan(), sum(parts).isnan())
            assert torch.equal(result.nan_to_num(), sum(parts).nan_to_num())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (9, 1234)], ids=str)
def test_tensors_of_all_ranks_are_gathered_in_order(
    ranks: Ranks, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    parts = [part.to(dtype) for part in parts_of(len(ranks.groups), shape, torch.float32)]
    for result in ranks.each(lambda group: group.all_gather(parts[group.rank])):
        assert torch.equal(result, torch.stack(parts))


@pytest.mark.parametrize("shape", [(), (0,), (5,), (9, 1234)], ids=str)
def test_a_broadcast_is_rank_0s(ranks: Ranks, shape: tuple[int, ...]) -> None:
    parts = parts_of(len(ranks.groups), shape, torch.bfloat16)
    expected = parts[0].clone()
    ranks.each(lambda group: group.broadcast(parts[group.rank]))
    for part in parts:
        assert torch.equal(part, expected)


def test_tensors_need_not_be_contiguous_and_are_not_changed(pair: Ranks) -> None:
    parts = [part.T for part in parts_of(2, (40, 60), torch.float32)]
    before = [part.clone() for part in parts]
    gathered = pair.each(lambda group: group.all_gather(parts[group.rank]))
    summed = pair.each(lambda group: group.all_reduce(parts[group.rank]))
    assert torch.equal(gathered[1], torch.stack(before))
    assert torch.equal(summed[1], before[0] + before[1])
    assert all(torch.equal(a, b) for a, b in zip(parts, before, strict=True))
    with pytest.raises(ValueError, match="contiguous"):
        pair.groups[0].broadcast(parts[0])
    with pytest.raises(ValueError, match="exchange"):
        pair.groups[0].broadcast(torch.ones(3, dtype=torch.complex64))
    assert pair.each(lambda group: reduce_ones(group)[0].item()) == [2, 2]


def test_the_counter_of_rounds_wraps(pair: Ranks) -> None:
    first = pair.groups[0]
    assert isinstance(first, SharedMemoryGroup)
    before = first._side.round
    tensor = torch.ones(SLOT)  # of four slots

    def run(group: RankGroup) -> None:
        for _ in range(300):
            assert group.all_reduce(tensor)[-1] == 2

    pair.each(run)
    assert before > 2**31 > first._side.round


# --- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0, 4), (6,), (17, 1023)], ids=str)
def test_messages_arrive_in_order_from_each_rank_to_each(
    ranks: Ranks, shape: tuple[int, ...]
) -> None:
    size = len(ranks.groups)
    parts = parts_of(size * size, shape, torch.bfloat16)

    def run(group: RankGroup) -> None:
        others = [rank for rank in range(size) if rank != group.rank]
        for _ in range(30):
            for to in others:
                for scale in (1, 2):
                    group.send(parts[group.rank * size + to] * scale, to)
            for source in others:
                for scale in (1, 2):
                    received = torch.empty(shape, dtype=torch.bfloat16)
                    group.receive(received, source)
                    assert torch.equal(received, parts[source * size + group.rank] * scale)

    # In shared memory, four slots have room for two messages of two slots.
    if math.prod(shape) * 2 <= 2 * SLOT:
        ranks.each(run)
    else:
        ranks.each(lambda group: one_way(group, parts[0]), ranks=(0, 1))


def one_way(group: RankGroup, tensor: Tensor) -> None:
    for scale in (1, 2, 4):
        if group.rank == 0:
            group.send(tensor * scale, 1)
        else:
            received = torch.empty_like(tensor)
            group.receive(received, 0)
            assert torch.equal(received, tensor * scale)


def test_two_messages_in_each_direction_wait_without_their_receiver(pair: Ranks) -> None:
    tensors = [torch.full((1500,), float(number)) for number in range(2)]

    def send(group: RankGroup) -> None:
        for tensor in tensors:
            sent = tensor.clone()
            group.send(sent, 1 - group.rank)
            sent.zero_()

    def receive(group: RankGroup) -> list[Tensor]:
        received = [torch.empty(1500) for _ in tensors]
        for tensor in received:
            group.receive(tensor, 1 - group.rank)
        return received

    for rank in (0, 1):  # one after the other: nothing is received meanwhile
        pair.each(send, ranks=[rank])
    for received in pair.each(receive):
        assert all(torch.equal(a, b) for a, b in zip(received, tensors, strict=True))


def test_there_is_no_message_to_itself_or_beyond(pair: Ranks) -> None:
    for peer in (0, 2, -1):
        with pytest.raises(ValueError, match=f"rank 0 has no peer {peer}"):
            pair.groups[0].send(torch.ones(1), peer)
    assert pair.each(lambda group: group.all_reduce(torch.ones(1)).item()) == [2, 2]


# --- failures -------------------------------------------------------------------------------------


def reduce_ones(group: RankGroup) -> Tensor:
    return group.all_reduce(torch.ones(3))


def gather_ones(group: RankGroup) -> Tensor:
    return group.all_gather(torch.ones(3))


def broadcast_ones(group: RankGroup) -> None:
    group.broadcast(torch.ones(3))


OUT_OF_STEP = {
    "another kind": (gather_ones, "all_gather of 12 bytes of torch.float32"),
    "another size": (
        lambda group: group.all_reduce(torch.ones(4)),
        "all_reduce of 16 bytes of torch.float32",
    ),
    "another dtype": (
        lambda group: group.all_reduce(torch.ones(6, dtype=torch.bfloat16)),
        "all_reduce of 12 bytes of torch.bfloat16",
    ),
}


@pytest.mark.parametrize("case", OUT_OF_STEP)
def test_a_rank_that_is_out_of_step_is_named(pair: Ranks, case: str) -> None:
    wrong, words = OUT_OF_STEP[case]
    errors = pair.errors(lambda group: (wrong if group.rank else reduce_ones)(group), None)
    named = [error for error in errors if "out of step" in error]
    assert named, errors
    for error in named:
        for part in ("rank 0", "rank 1", words, "all_reduce of 12 bytes of torch.float32"):
            assert part in error


def test_a_wrong_broadcast_is_found_in_the_next_operation_at_the_latest(ranks: Ranks) -> None:
    def run(group: RankGroup) -> None:
        (gather_ones if group.rank == 1 else broadcast_ones)(group)
        reduce_ones(group)

    assert any("rank 1" in error and "out of step" in error for error in ranks.errors(run, None))


def test_a_message_of_another_size_is_out_of_step(pair: Ranks) -> None:
    pair.each(lambda group: group.send(torch.ones(3), 1), ranks=[0])
    (error,) = pair.errors(lambda group: group.receive(torch.ones(4), 0), ranks=[1])
    assert "message of 16 bytes" in error
    assert "message of 12 bytes" in error


WAITS: dict[str, Callable[[RankGroup], Any]] = {
    "all_reduce": reduce_ones,
    "all_gather": gather_ones,
    "broadcast": broadcast_ones,
    "receive": lambda group: group.receive(torch.ones(3), 0),
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_ends_after_the_timeout_and_so_does_the_group(pair: Ranks, wait: str) -> None:
    group = pair.groups[1]
    group.timeout_s = 0.2
    started = time.monotonic()
    (error,) = pair.errors(WAITS[wait], ranks=[1])
    assert 0.2 <= time.monotonic() - started < BOUND_S
    if isinstance(group, SharedMemoryGroup):
        assert "rank 1 has waited 0.2 s for rank 0" in error
    # Again at once, on both sides.
    group.timeout_s = pair.groups[0].timeout_s = 600.0
    assert pair.errors(WAITS[wait], ranks=[1]) == [error]
    pair.errors(reduce_ones, ranks=[0])


def test_a_send_without_room_ends_after_the_timeout(pair: Ranks) -> None:
    pair.groups[0].timeout_s = 0.2
    for _ in range(4):
        pair.groups[0].send(torch.ones(3), 1)
    (error,) = pair.errors(lambda group: group.send(torch.ones(3), 1), ranks=[0])
    assert "rank 0 has waited 0.2 s for rank 1 in message of 12 bytes" in error


@pytest.mark.parametrize("way", ["fail", "close"])
@pytest.mark.parametrize("wait", WAITS)
def test_a_waiting_rank_fails_when_another_one_fails_or_closes(
    pair: Ranks, wait: str, way: str
) -> None:
    pair.groups[1].timeout_s = math.inf
    waiting = pair.start(WAITS[wait], 1)
    assert not waiting.done()
    if way == "fail":
        pair.groups[0].fail("the weights are wrong")
    else:
        pair.groups[0].close()
    with pytest.raises(RankError) as raised:
        waiting.result(BOUND_S)
    if isinstance(pair.groups[0], SharedMemoryGroup):
        wanted = {"fail": "the weights are wrong", "close": "rank 0 has closed the group"}
        assert wanted[way] in str(raised.value)
        # Only the first reason is kept.
        pair.groups[1].fail("because of that")
    pair.errors(reduce_ones, None)


def test_all_of_four_ranks_see_the_first_reason() -> None:
    with closing(Ranks(4)) as ranks:
        waiting = [ranks.start(reduce_ones, rank) for rank in range(3)]
        ranks.groups[3].fail("é" * 1000)
        for each in waiting:
            with pytest.raises(RankError, match="ééé"):
                each.result(BOUND_S)
        with pytest.raises(RankError, match="ééé"):
            reduce_ones(ranks.groups[3])


def test_a_rank_receives_messages_sent_before_the_other_one_closed(pair: Ranks) -> None:
    first, second = pair.groups
    second_sum = pair.start(reduce_ones, 1)
    assert reduce_ones(first).tolist() == [2.0] * 3
    first.send(torch.full((3,), 5.0), 1)
    broadcast_ones(first)
    first.close()
    assert second_sum.result(BOUND_S).tolist() == [2.0] * 3
    received = torch.zeros(3)
    second.receive(received, 0)
    assert received.tolist() == [5.0] * 3
    second.broadcast(received)
    assert received.tolist() == [1.0] * 3
    with pytest.raises(RankError, match="rank 0 has closed the group"):
        reduce_ones(second)


def test_a_closed_group_says_so(ranks: Ranks) -> None:
    for group in ranks.groups:
        group.close()
        group.close()
        with pytest.raises(RankError, match="the group is closed"):
            reduce_ones(group)
        group.fail("nothing happens any more")


def test_close_ends_the_operation_of_its_own_rank(pair: Ranks) -> None:
    pair.groups[1].timeout_s = 600.0
    waiting = pair.start(reduce_ones, 1)
    pair.groups[1].close()
    with pytest.raises(RankError, match="the group is closed"):
        waiting.result(BOUND_S)


def test_an_operation_that_is_interrupted_ends_the_group(pair: Ranks) -> None:
    class Interrupted(BaseException):
        pass

    def interrupt(_: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code is not SharedMemoryGroup._wait.__code__:
            frame = frame.f_back
        if frame is not None:
            raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        # Until it waits for the other rank.
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        with pytest.raises(Interrupted):
            reduce_ones(pair.groups[0])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    for error in pair.errors(reduce_ones, None):
        assert error.startswith("rank 0 stopped: ")


def test_a_group_of_one_has_its_own_tensors() -> None:
    group, tensor = OneRank(), torch.ones(3)
    group.broadcast(tensor)
    assert torch.equal(group.all_reduce(tensor), tensor)
    assert torch.equal(group.all_gather(tensor), tensor[None])


# --- processes ------------------------------------------------------------------------------------


@contextmanager
def process(size: int = 2) -> Iterator[tuple[RankGroup, Any]]:
    """Yield rank 0, in this process, and the process of the last rank, which adds without end; the
    ranks between are threads of this process."""
    context = multiprocessing.get_context("fork")
    group = SharedMemoryGroup.create(size, SLOT)

    def run() -> None:
        try:
            last = SharedMemoryGroup.attach(group.descriptor, size - 1)
            while True:
                last.all_reduce(torch.ones(3))
        except RankError:
            os._exit(7)

    child = context.Process(target=run, daemon=True)
    child.start()
    try:
        yield group, child
    finally:
        child.kill()
        child.join(BOUND_S)
        group.close()


def test_a_killed_rank_is_noticed_long_before_the_timeout() -> None:
    with process() as (group, child):
        for _ in range(20):
            assert reduce_ones(group).tolist() == [2.0] * 3
        group.timeout_s = 2 * BOUND_S
        os.kill(child.pid, signal.SIGKILL)  # a zombie until `join`
        started = time.monotonic()
        with pytest.raises(RankError) as raised:
            for _ in range(3):
                reduce_ones(group)
        assert time.monotonic() - started < BOUND_S
        assert str(raised.value) == "the process of rank 1 has ended"


def test_a_stopped_rank_is_noticed_by_the_timeout() -> None:
    with process() as (group, child):
        assert reduce_ones(group).tolist() == [2.0] * 3
        os.kill(child.pid, signal.SIGSTOP)
        group.timeout_s = 0.3
        with pytest.raises(RankError):
            for _ in range(3):
                reduce_ones(group)
        os.kill(child.pid, signal.SIGCONT)
        group.close()
        child.join(BOUND_S)
        assert child.exitcode == 7  # by its own RankError


def test_memory_ends_with_its_processes() -> None:
    with process() as (group, child):
        reduce_ones(group)
        assert isinstance(group, SharedMemoryGroup)
        os.kill(child.pid, signal.SIGKILL)
        child.join(BOUND_S)
    assert "nano-ranks" not in Path("/proc/self/maps").read_text()
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not any("nano-ranks" in link for link in links)


# --- set-up ---------------------------------------------------------------------------------------


def test_only_memory_of_a_group_is_attached() -> None:
    with closing(SharedMemoryGroup.create(2, SLOT)) as group:
        with pytest.raises(RankError, match="there is no rank 2 in a group of 2"):
            SharedMemoryGroup.attach(group.descriptor, 2)
        with pytest.raises(RankError, match="rank 0 is attached already"):
            SharedMemoryGroup.attach(group.descriptor, 0)
        size_bytes = os.fstat(group.descriptor).st_size
        content = os.pread(group.descriptor, size_bytes, 0)
    wrong = {
        "sealed": b"\0" * size_bytes,
        "version": content[:8] + b"\xff" + content[9:],
        "longer": content + b"\0" * 4096,
        "shorter": content[:4096],
        "short": content[:64],
        "empty": b"",
    }
    for case, written in wrong.items():
        descriptor = os.memfd_create(case, os.MFD_ALLOW_SEALING)
        try:
            os.write(descriptor, written)
            with pytest.raises(RankError, match="isn't sealed"):
                SharedMemoryGroup.attach(descriptor, 1)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, shared_memory._SEALS)
            with pytest.raises(RankError, match=r"memory of a group|can't be mapped"):
                SharedMemoryGroup.attach(descriptor, 1)
        finally:
            os.close(descriptor)
    reading, writing = os.pipe()
    with pytest.raises(RankError, match="isn't the memory of a group"):
        SharedMemoryGroup.attach(reading, 1)
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(("size", "slot"), [(0, 64), (65, 64), (2, 0), (2, 100), (2, -64)])
def test_impossible_groups_are_refused(size: int, slot: int) -> None:
    with pytest.raises(RankError, match=r"1 to 64 ranks|multiple of 64"):
        SharedMemoryGroup.create(size, slot)


def test_shared_memory_needs_a_compiler_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """No flag of the processor, no OpenMP."""

    def absent() -> str:
        raise compile_module.KernelsUnavailable("there is none")

    monkeypatch.setattr(compile_module, "processor_flags", absent)
    monkeypatch.setattr(compile_module, "_openmp_of_torch", absent)
    monkeypatch.setattr(compile_module.platform, "machine", lambda: "aarch64")
    compile_module.load_library(compile_module.RANKS)


def test_a_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/no/compiler")
    shared_memory._library.cache_clear()
    with pytest.raises(RankError, match="ranks can't share memory: can't run /no/compiler"):
        SharedMemoryGroup.create(2, SLOT)
    shared_memory._library.cache_clear()
