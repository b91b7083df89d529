"""Devices by torch's names: which is taken, what is said of one that is not there, and marked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nano_inference.config import ModelError
from nano_inference.stages.executor.runner import device as devices
from nano_inference.stages.executor.runner.batch import Uploader


class Driver:
    """What torch has for each kind of device, as `torch.cuda`."""

    def __init__(self, count: int) -> None:
        self.count = count

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def get_device_name(self, device: torch.device) -> str:
        return f"Maker {device.type.upper()}"

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 7, 9


Machine = Any


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with so many devices of each kind, as far as one can tell without computing."""

    def made(**counts: int) -> None:
        def module(kind: str) -> Driver:
            return Driver(counts.get(kind, 0))

        monkeypatch.setattr(torch, "get_device_module", module)

    return made


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({}, "cpu"),
        ({"mps": 1}, "mps"),
        ({"mps": 1, "xpu": 2}, "xpu:0"),
        ({"xpu": 1, "cuda": 2}, "cuda:0"),
    ],
)
def test_auto_takes_the_first_that_is_there(
    machine: Machine, counts: dict[str, int], expected: str
) -> None:
    machine(**counts)
    assert str(devices.resolve_device("auto")) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(("cpu", "cpu"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")),
        *(("xpu", "xpu:0"), ("mps", "mps"), ("mps:0", "mps")),
    ],
)
def test_a_name_of_torch_is_that_device(machine: Machine, name: str, expected: str) -> None:
    machine(cuda=2, xpu=1, mps=1)
    assert str(devices.resolve_device(name)) == expected


@pytest.mark.parametrize("name", ["cuda:2", "xpu", "mps:0", "meta", "cpu:1", "gpu", "cuda:x"])
def test_what_is_not_there_is_refused_with_what_is(machine: Machine, name: str) -> None:
    machine(cuda=2)
    with pytest.raises(ModelError, match=rf"'{name}'.*; here are cuda:0, cuda:1, cpu; use one"):
        devices.resolve_device(name)


def test_replicas_take_one_device_after_the_other(machine: Machine) -> None:
    machine(cuda=2, xpu=1)
    names = [devices.device_of_replica("auto", replica) for replica in range(3)]
    assert names == ["cuda:0", "cuda:1", "cuda:0"]
    assert devices.device_of_replica("xpu", 1) == "xpu"
    assert devices.device_of_replica("cuda:0", 1) == "cuda:0"


def test_devices_on_which_no_test_ran_are_marked(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(cuda=1, xpu=1, mps=1)
    described = {name: devices.describe_device(torch.device(name)) for name in ("cpu", "xpu:0")}
    assert described == {"cpu": "cpu", "xpu:0": "xpu:0 Maker XPU (unverified)"}
    assert devices.describe_device(torch.device("mps")) == "mps (unverified)"
    monkeypatch.setattr(torch.version, "hip", "7.1")
    amd = devices.describe_device(torch.device("cuda:0"))
    assert amd == "cuda:0 Maker CUDA, ROCm 7.1 (unverified)"


def test_memory_is_that_of_the_device_where_it_has_its_own(machine: Machine) -> None:
    machine(cuda=1, xpu=1, mps=1)
    found = {name: devices.free_memory(torch.device(name)) for name in ("cpu", "mps", "xpu:0")}
    assert found == {"cpu": None, "mps": None, "xpu:0": (7, 9)}


def test_what_a_step_needs_gets_to_a_device_that_is_no_cuda() -> None:
    ids, table = Uploader(torch.device("meta"))(np.arange(3), np.zeros((2, 4), np.int64))
    assert (ids.device.type, tuple(ids.shape)) == ("meta", (3,))
    assert (table.device.type, tuple(table.shape)) == ("meta", (2, 4))
