"""The log of weights gives each version's bits back, or nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nano_inference import EngineConfig, WeightLog
from nano_inference.config import ModelError
from nano_inference.stages.executor import WeightSyncManager
from nano_inference.stages.executor.runner.weights.logged import LoggedWeights

from ...models import make_model
from ...refusals import refused

State = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the disk, which take most of the time."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


class Engine:
    """One executor's weights and its log. Each update changes some bits of every tensor."""

    def __init__(self, folder: Path, run: str = "run", **settings: int) -> None:
        self.module: nn.Module = make_model("qwen2").to(torch.bfloat16)
        self.manager = WeightSyncManager(self.module)
        more = {f"weight_log_{name}": value for name, value in settings.items()}
        config = EngineConfig(weight_log=str(folder), **more)  # type: ignore[arg-type]
        self.log = LoggedWeights(self.manager, config)
        self.log.begin_run(run)
        self.dice = torch.Generator().manual_seed(7)

    @property
    def state(self) -> State:
        return {name: tensor.clone() for name, tensor in self.module.state_dict().items()}

    def update(self, version: int | None = None, *, lands: bool = True) -> State:
        new = {name: tensor.clone() for name, tensor in self.state.items()}
        del new["lm_head.weight"]
        for tensor in new.values():
            place = int(torch.randint(tensor.numel(), (), generator=self.dice))
            tensor.view(-1).view(torch.int16)[place] ^= 1
        prepared = self.log.prepare(self.manager.prepare(new))
        version = self.manager.check_version(version)
        self.log.commit(prepared, version)
        if lands:
            self.manager.sync_blocking(new, version)
        return self.state


def same(left: State, right: State) -> bool:
    return all(
        torch.equal(left[name].view(torch.uint8), right[name].view(torch.uint8)) for name in left
    )


def kinds(log: WeightLog) -> list[str]:
    return [f"{each.version} {each.kind}" for each in log.versions()]


def test_each_version_is_read_back(tmp_path: Path) -> None:
    """Version 0, that of the model's folder, too."""
    engine = Engine(tmp_path, snapshot_every=2)
    states = {0: engine.state} | {version: engine.update() for version in range(1, 5)}
    states[70] = engine.update(70)
    log = WeightLog(tmp_path)
    assert kinds(log) == ["0 snapshot", "1 delta", "2 delta", "3 snapshot", "4 delta", "70 delta"]
    for version, state in states.items():
        assert same(log.weights(version), state)
    deltas = [each.num_bytes for each in log.versions() if each.kind == "delta"]
    assert max(deltas) < log.versions()[0].num_bytes / 10
    with refused("weights_unlogged", "0 to 70"):
        log.weights(5)
    with refused("weights_unlogged"):
        WeightLog(tmp_path / "none").weights(0)


def test_two_executors_write_a_version_once(tmp_path: Path) -> None:
    first, second = Engine(tmp_path), Engine(tmp_path)
    for version in range(1, 4):
        assert same(first.update(), second.update())
        assert len(WeightLog(tmp_path).versions()) == version + 1
    assert same(WeightLog(tmp_path).weights(3), first.state)
    assert not list((tmp_path / "run").glob(".*"))


def test_a_late_executor_catches_up_and_goes_on(tmp_path: Path) -> None:
    first, late = Engine(tmp_path, snapshot_every=3), Engine(tmp_path, "its own", snapshot_every=3)
    for _ in range(5):
        first.update()
    digest = first.log.writer.digest_of(5)
    weights = late.log.catch_up("run", 5, digest)
    late.manager.sync_blocking(weights, 5)
    assert same(late.state, first.state)
    assert late.log.writer.digest_of(5) == digest
    late.update(lands=False)
    assert WeightLog(tmp_path).runs() == ["run"]
    other = Engine(tmp_path)
    with refused("weights_delta", "other weights than were in place"):
        other.log.catch_up("run", 5, "0" * 32)


def test_a_version_that_did_not_land_is_replaced(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.update()
    engine.update(9, lands=False)
    engine.update(2, lands=False)
    state = engine.update(2)
    assert kinds(WeightLog(tmp_path)) == ["0 snapshot", "1 delta", "2 delta"]
    assert same(WeightLog(tmp_path).weights(2), state)


def test_the_oldest_versions_are_dropped_with_their_snapshot(tmp_path: Path) -> None:
    old = Engine(tmp_path, "old")
    old.update()
    engine = Engine(tmp_path, snapshot_every=2, max_versions=4)
    for _ in range(8):
        state = engine.update()
    log = WeightLog(tmp_path)
    assert log.runs() == ["run"]
    assert kinds(log) == ["6 snapshot", "7 delta", "8 delta"]
    assert same(log.weights(8), state)
    small = Engine(tmp_path / "small", snapshot_every=2, max_bytes=1)
    for _ in range(4):
        small.update()
    assert kinds(WeightLog(tmp_path / "small")) == ["3 snapshot", "4 delta"]


def test_weights_without_a_base_are_a_snapshot(tmp_path: Path) -> None:
    """After their memory was released, or when the version in place is not in the log."""
    engine = Engine(tmp_path)
    engine.update()
    engine.manager.empty = True
    engine.update()
    engine.manager.version = 5
    engine.log.writer._digests.clear()
    state = engine.update()
    assert kinds(WeightLog(tmp_path)) == ["0 snapshot", "1 delta", "2 snapshot", "6 snapshot"]
    assert same(WeightLog(tmp_path).weights(6), state)


@pytest.mark.parametrize("damage", ["cut", "altered", "lost"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    engine = Engine(tmp_path)
    states = [engine.update() for _ in range(3)]
    log = WeightLog(tmp_path)
    path = log.versions()[2].path
    content = bytearray(path.read_bytes())
    if damage == "lost":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[:-5])
    else:
        content[-3] ^= 1
        path.write_bytes(content)
    code = {"cut": "weights_refused", "altered": "weights_delta", "lost": "weights_unlogged"}
    with refused(code[damage]):
        log.weights(3)
    assert same(log.weights(1), states[0])


def test_an_unwritable_log_refuses_the_update(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    before = engine.state
    (tmp_path / "run").write_text("no folder")
    with refused("weights_log"):
        engine.update()
    assert same(engine.state, before)


def test_codes_have_no_log(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.manager.shards.converts = True
    with pytest.raises(ModelError, match=r"engine\.quantization"):
        LoggedWeights(engine.manager, EngineConfig(weight_log=str(tmp_path)))
