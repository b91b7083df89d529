"""A group delivers broadcasts in time or not at all, and ends after an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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

from .peers import Peer, free_address
from .samples import same, samples

CPU = torch.device("cpu")
LIMIT_S = 60.0

Groups = Callable[[], WeightGroups]


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


@pytest.mark.parametrize("bucket_bytes", [0, 1, 150, 1 << 20])
def test_all_tensors_come_through(groups: WeightGroups, bucket_bytes: int) -> None:
    with WeightsGroup("127.0.0.1:0", 2, timeout_s=LIMIT_S) as trainer:
        join(groups, trainer.address)
        for seed in range(3):
            wanted = samples(seed)
            sending = trainer.broadcast(wanted, bucket_bytes)
            # As it crosses the bus.
            source = msgspec.msgpack.decode(
                msgspec.msgpack.encode(sending.source), type=GroupWeights
            )
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
    with Peer("slime-pp_0") as peer:
        join(groups, peer.address, name="slime-pp_0")
        assert peer.hear() == "joined"
        for _ in range(2):
            assert same(receive_all(groups, peer, file), load_file(file))


def test_a_trainer_that_is_killed_in_mid_broadcast(groups: WeightGroups, file: Path) -> None:
    with Peer() as peer:
        join(groups, peer.address)
        assert peer.hear() == "joined"
        peer.tell("half", file)
        receiving = in_background(lambda: groups.receive(peer.source(file), LIMIT_S))
        assert peer.hear() == "half"
        peer.kill()
        with pytest.raises(WeightsError) as broken:
            receiving.result(LIMIT_S / 2)
        assert broken.value.code == "weights_interrupted"
        with pytest.raises(WeightsError, match="not in the group"):
            groups.receive(peer.source(file), LIMIT_S)
    with Peer() as peer:
        join(groups, peer.address)
        assert same(receive_all_after_join(groups, peer, file), load_file(file))


def receive_all_after_join(groups: WeightGroups, peer: Peer, file: Path) -> dict[str, Tensor]:
    assert peer.hear() == "joined"
    return receive_all(groups, peer, file)


def test_a_trainer_that_hangs(groups: WeightGroups, file: Path) -> None:
    with Peer() as peer:
        join(groups, peer.address)
        assert peer.hear() == "joined"
        peer.hang()
        started = time.monotonic()
        with pytest.raises(WeightsError) as late:
            groups.receive(peer.source(file), 1.0)
        assert late.value.code == "weights_timeout"
        assert time.monotonic() - started < LIMIT_S / 2
    with Peer() as peer:
        join(groups, peer.address)
        assert same(receive_all_after_join(groups, peer, file), load_file(file))


def test_leaving_ends_a_receive_in_progress(groups: WeightGroups, file: Path) -> None:
    with Peer() as peer:
        join(groups, peer.address)
        assert peer.hear() == "joined"
        receiving = in_background(lambda: groups.receive(peer.source(file), LIMIT_S))
        peer.tell("half", file)
        assert peer.hear() == "half"
        groups.leave("weights")
        with pytest.raises(WeightsError, match="was left") as left:
            receiving.result(LIMIT_S / 2)
        assert left.value.code == "weights_interrupted"


def test_skipped_broadcasts_are_not_taken_for_the_next_weights(groups: WeightGroups) -> None:
    with WeightsGroup("127.0.0.1:0", 2, timeout_s=LIMIT_S) as trainer:
        join(groups, trainer.address)
        small = {"x": torch.zeros(3)}
        trainer.broadcast(small)
        second = trainer.broadcast({"x": torch.ones(3)})
        with pytest.raises(WeightsError, match="number 1 of the group, and the executor's is 0"):
            groups.receive(second.source, LIMIT_S)
        with pytest.raises(WeightsError, match="not in the group"):
            groups.receive(trainer.broadcast(small).source, LIMIT_S)


def test_a_skipped_broadcast_ends_the_group(groups: WeightGroups) -> None:
    with WeightsGroup("127.0.0.1:0", 2, timeout_s=LIMIT_S) as trainer:
        join(groups, trainer.address)
        source = trainer.broadcast({"x": torch.zeros(3)}).source
        groups.skip("weights")
        with pytest.raises(WeightsError, match="not in the group"):
            groups.receive(source, LIMIT_S)


def test_a_skipped_broadcast_lets_the_one_before_it_end(groups: WeightGroups) -> None:
    with WeightsGroup("127.0.0.1:0", 2, timeout_s=LIMIT_S) as trainer:
        join(groups, trainer.address)
        begun = threading.Event()
        wanted = {"x": torch.arange(5)}
        metas = (TensorMeta("x", "int64", (5,)),)

        def receive() -> object:
            begun.set()
            return groups.receive(GroupWeights("weights", metas), LIMIT_S)

        receiving = in_background(receive)
        assert begun.wait(LIMIT_S)
        while not groups._members["weights"].receiving:
            time.sleep(0.001)
        groups.skip("weights")
        trainer.broadcast(wanted)
        found = receiving.result(LIMIT_S)
        assert isinstance(found, dict)
        assert same(found, wanted)
        with pytest.raises(WeightsError, match="not in the group"):
            groups.receive(GroupWeights("weights", metas), LIMIT_S)


@pytest.mark.parametrize(
    "source",
    [
        GroupWeights("weights", (TensorMeta("x", "float31", (1,)),)),
        GroupWeights("weights", (TensorMeta("x", "float32", (-1,)),)),
        GroupWeights("weights", (TensorMeta("x", "float32", (1,)),) * 2),
        GroupWeights("weights", (TensorMeta("x", "float32", (1 << 55,)),)),
        GroupWeights("weights", (TensorMeta("x", "float32", (1,)),), -1),
    ],
)
def test_an_invalid_message_is_refused(groups: WeightGroups, source: GroupWeights) -> None:
    with WeightsGroup("127.0.0.1:0", 2, timeout_s=LIMIT_S) as trainer:
        join(groups, trainer.address)
        with pytest.raises(WeightsError) as refused:
            groups.receive(source, LIMIT_S)
        assert refused.value.code == "weights_refused"


def test_a_group_that_is_missing(groups: WeightGroups) -> None:
    with pytest.raises(WeightsError, match="no group is at") as late:
        join(groups, free_address(), timeout_s=0.3)
    assert late.value.code == "weights_timeout"


def test_members_that_do_not_join_time_out(groups: WeightGroups) -> None:
    with WeightsGroup("127.0.0.1:0", 3, timeout_s=2.0) as trainer:
        with pytest.raises(WeightsError) as late:
            join(groups, trainer.address, world_size=3, timeout_s=1.0)
        assert late.value.code == "weights_timeout"
        with pytest.raises(WeightsError) as missed:
            trainer.broadcast({"x": torch.zeros(1)}).result()
        assert missed.value.code in ("weights_timeout", "weights_interrupted")


def test_an_executor_that_does_not_receive_ends_the_broadcast(groups: WeightGroups) -> None:
    with WeightsGroup("127.0.0.1:0", 2, timeout_s=2.0) as trainer:
        join(groups, trainer.address)
        sending = trainer.broadcast({"x": torch.zeros(1 << 24)})
        with pytest.raises(WeightsError) as late:
            sending.result()
        assert late.value.code == "weights_timeout"


def test_a_trainer_that_leaves_while_it_sends(groups: WeightGroups) -> None:
    with WeightsGroup("127.0.0.1:0", 2, timeout_s=LIMIT_S) as trainer:
        join(groups, trainer.address)
        sending = trainer.broadcast({"x": torch.zeros(1 << 24)})
    with pytest.raises(WeightsError) as left:
        sending.result()
    assert left.value.code == "weights_interrupted"


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
        with WeightsGroup("127.0.0.1:0", 2, timeout_s=LIMIT_S) as trainer:
            join(groups, trainer.address)
            wanted = {"x": torch.full((2,), number)}
            assert same(groups.receive(trainer.broadcast(wanted).source, LIMIT_S), wanted)
