"""A group delivers broadcasts in time or not at all, and ends after an error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nano_inference.bus.control import JoinWeightsGroup
from nano_inference.bus.weights import GroupWeights, TensorMeta
from nano_inference.config import WeightsError
from nano_inference.stages.executor.runner.weights.transports import (
    WeightGroups,
    WeightsGroup,
    fetch,
)
from nano_inference.stages.executor.runner.weights.transports.layout import distinct

from ....refusals import refused
from .peers import Peer, free_address
from .samples import same, samples

CPU = torch.device("cpu")
LIMIT_S = 60.0


@pytest.fixture
def groups() -> Iterator[WeightGroups]:
    made = WeightGroups()
    yield made
    made.close()


def join(
    groups: WeightGroups,
    address: str,
    *,
    name: str = "weights",
    rank: int = 1,
    world_size: int = 2,
    timeout_s: float = LIMIT_S,
) -> None:
    wish = JoinWeightsGroup(name, address, rank, world_size, "gloo", timeout_s)
    groups.join(wish, CPU).result(2 * LIMIT_S)


def in_background(function: Callable[[], object]) -> Future[object]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function)
    pool.shutdown(wait=False)
    return future


@contextmanager
def joined_trainer(groups: WeightGroups, timeout_s: float = LIMIT_S) -> Iterator[WeightsGroup]:
    with WeightsGroup("127.0.0.1:0", 2, timeout_s=timeout_s) as trainer:
        join(groups, trainer.address)
        yield trainer


@pytest.fixture
def trainer(groups: WeightGroups) -> Iterator[WeightsGroup]:
    """A trainer whose group the executor has joined."""
    with joined_trainer(groups) as made:
        yield made


@contextmanager
def joined_peer(groups: WeightGroups, name: str = "weights") -> Iterator[Peer]:
    with Peer(name) as peer:
        join(groups, peer.address, name=name)
        assert peer.hear() == "joined"
        yield peer


@pytest.mark.parametrize(
    ("bucket_bytes", "packed"),
    [(0, False), (1, False), (150, False), (1 << 20, False), (150, True), (1 << 20, True)],
)
def test_all_tensors_come_through(
    groups: WeightGroups, trainer: WeightsGroup, bucket_bytes: int, packed: bool
) -> None:
    for seed in range(3):
        wanted = samples(seed)
        sending = trainer.broadcast(wanted, bucket_bytes, packed=packed)
        # As it crosses the bus.
        source = msgspec.msgpack.decode(msgspec.msgpack.encode(sending.source), type=GroupWeights)
        assert same(fetch(source, groups, LIMIT_S), distinct(wanted))
        sending.result()


def test_two_executors_of_one_process(groups: WeightGroups) -> None:
    others = WeightGroups()
    with WeightsGroup("127.0.0.1:0", 3, name="pair", timeout_s=LIMIT_S) as trainer:
        late = in_background(
            lambda: join(others, trainer.address, name="pair", rank=2, world_size=3)
        )
        join(groups, trainer.address, name="pair", world_size=3)
        late.result(LIMIT_S)
        sending = trainer.broadcast(samples())
        late = in_background(lambda: others.receive(sending.source, LIMIT_S))
        assert same(groups.receive(sending.source, LIMIT_S), distinct(samples()))
        found = late.result(LIMIT_S)
        assert isinstance(found, dict)
        assert same(found, distinct(samples()))
        sending.result()
    others.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Weights that don't fit the buffers of a connection."""
    wanted = {
        f"layer.{index}": torch.randn(512, 512 + index, generator=torch.Generator().manual_seed(1))
        for index in range(8)
    }
    wanted["norm"] = torch.randn(64).bfloat16()
    save_file(wanted, tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


def receive_all(groups: WeightGroups, peer: Peer, file: Path) -> dict[str, Tensor]:
    peer.tell("send", file)
    found = groups.receive(peer.source(file), LIMIT_S)
    assert peer.hear() == "send"
    return found


def test_a_trainer_that_makes_its_group_as_slime_and_sglang_do(
    groups: WeightGroups, file: Path
) -> None:
    with joined_peer(groups, "slime-pp_0") as peer:
        for _ in range(2):
            assert same(receive_all(groups, peer, file), load_file(file))


def test_a_trainer_that_is_killed_in_mid_broadcast(groups: WeightGroups, file: Path) -> None:
    with joined_peer(groups) as peer:
        peer.tell("half", file)
        receiving = in_background(lambda: groups.receive(peer.source(file), LIMIT_S))
        assert peer.hear() == "half"
        peer.kill()
        with refused("weights_interrupted"):
            receiving.result(LIMIT_S / 2)
        with pytest.raises(WeightsError, match="not in the group"):
            groups.receive(peer.source(file), LIMIT_S)
    with joined_peer(groups) as peer:
        assert same(receive_all(groups, peer, file), load_file(file))


def test_a_trainer_that_hangs(groups: WeightGroups, file: Path) -> None:
    with joined_peer(groups) as peer:
        peer.hang()
        started = time.monotonic()
        with refused("weights_timeout"):
            groups.receive(peer.source(file), 1.0)
        assert time.monotonic() - started < LIMIT_S / 2
    with joined_peer(groups) as peer:
        assert same(receive_all(groups, peer, file), load_file(file))


def test_leaving_ends_a_receive_in_progress(groups: WeightGroups, file: Path) -> None:
    with joined_peer(groups) as peer:
        receiving = in_background(lambda: groups.receive(peer.source(file), LIMIT_S))
        peer.tell("half", file)
        assert peer.hear() == "half"
        groups.leave("weights")
        with refused("weights_interrupted", "was left"):
            receiving.result(LIMIT_S / 2)


def test_skipped_broadcasts_are_not_taken_for_the_next_weights(
    groups: WeightGroups, trainer: WeightsGroup
) -> None:
    small = {"x": torch.zeros(3)}
    trainer.broadcast(small)
    second = trainer.broadcast({"x": torch.ones(3)})
    with pytest.raises(WeightsError, match="number 1 of the group, and the executor's is 0"):
        groups.receive(second.source, LIMIT_S)
    with pytest.raises(WeightsError, match="not in the group"):
        groups.receive(trainer.broadcast(small).source, LIMIT_S)


def test_a_skipped_broadcast_lets_the_one_before_it_end(
    groups: WeightGroups, trainer: WeightsGroup
) -> None:
    wanted = {"x": torch.arange(5)}
    source = GroupWeights("weights", (TensorMeta("x", "int64", (5,)),))
    receiving = in_background(lambda: groups.receive(source, LIMIT_S))
    while not groups._members["weights"].receiving:
        time.sleep(0.001)
    groups.skip("weights")
    trainer.broadcast(wanted)
    found = receiving.result(LIMIT_S)
    assert isinstance(found, dict)
    assert same(found, wanted)
    with pytest.raises(WeightsError, match="not in the group"):
        groups.receive(source, LIMIT_S)


@pytest.mark.parametrize(
    "source",
    [
        GroupWeights("weights", (TensorMeta("x", "float31", (1,)),)),
        GroupWeights("weights", (TensorMeta("x", "float32", (1 << 55,)),)),
        GroupWeights("weights", (TensorMeta("x", "float32", (1,)),), -1),
    ],
)
@pytest.mark.usefixtures("trainer")
def test_an_invalid_message_is_refused(groups: WeightGroups, source: GroupWeights) -> None:
    with refused("weights_refused"):
        groups.receive(source, LIMIT_S)


def test_a_group_that_is_missing(groups: WeightGroups) -> None:
    with refused("weights_timeout", "no group is at"):
        join(groups, free_address(), timeout_s=0.3)


def test_members_that_do_not_join_time_out(groups: WeightGroups) -> None:
    with WeightsGroup("127.0.0.1:0", 3, timeout_s=2.0) as trainer:
        with refused("weights_timeout"):
            join(groups, trainer.address, world_size=3, timeout_s=1.0)
        with pytest.raises(WeightsError) as missed:
            trainer.broadcast({"x": torch.zeros(1)}).result()
        assert missed.value.code in ("weights_timeout", "weights_interrupted")


def test_an_executor_that_does_not_receive_ends_the_broadcast(groups: WeightGroups) -> None:
    with joined_trainer(groups, 2.0) as trainer:
        sending = trainer.broadcast({"x": torch.zeros(1 << 24)})
        with refused("weights_timeout"):
            sending.result()


def test_a_trainer_that_leaves_while_it_sends(groups: WeightGroups) -> None:
    with joined_trainer(groups) as trainer:
        sending = trainer.broadcast({"x": torch.zeros(1 << 24)})
    with refused("weights_interrupted"):
        sending.result()


def test_nccl_without_a_gpu(groups: WeightGroups) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with WeightsGroup("127.0.0.1:0", 2, timeout_s=LIMIT_S) as trainer:
        wish = JoinWeightsGroup("weights", trainer.address, 1, 2, "nccl", 5.0)
        with pytest.raises(WeightsError, match="NCCL"):
            groups.join(wish, CPU).result(LIMIT_S)


def test_an_unavailable_backend_is_refused() -> None:
    with (
        WeightsGroup("127.0.0.1:0", 2, backend="mpi", timeout_s=LIMIT_S) as trainer,
        pytest.raises(WeightsError, match="'mpi' is unknown"),
    ):
        trainer.broadcast({"x": torch.zeros(1)}).result()


def test_a_group_of_one_name_is_left_when_another_is_joined(groups: WeightGroups) -> None:
    for number in range(3):
        with joined_trainer(groups) as trainer:
            wanted = {"x": torch.full((2,), number)}
            assert same(groups.receive(trainer.broadcast(wanted).source, LIMIT_S), wanted)
