"""Which back end a model gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nano_inference.config import EngineConfig
from nano_inference.stages.executor import LoadedModel
from nano_inference.stages.executor.attention.choose import choose_backend
from nano_inference.stages.executor.attention.cpu import CpuBackend
from nano_inference.stages.executor.attention.gather import GatherBackend
from nano_inference.stages.executor.attention.tiled import TiledBackend
from nano_inference.stages.executor.kernels import cpu
from nano_inference.stages.executor.kernels.compile import KernelsUnavailable
from nano_inference.stages.executor.loaded_model import LayerSpec


def model(dtype: torch.dtype, width: int = 32) -> LoadedModel:
    config: Any = None
    layers = (LayerSpec(2, width, width, None),)
    return LoadedModel(nn.Module(), config, torch.device("cpu"), dtype, 64, 16, layers)


@pytest.mark.parametrize(
    ("changes", "kind", "why"),
    [
        ({"deterministic": True}, TiledBackend, "deterministic mode has its own"),
        ({"deterministic": True, "kernels": "off"}, TiledBackend, "deterministic mode has its own"),
        ({"kernels": "off"}, GatherBackend, "engine.kernels is off"),
    ],
)
def test_settings_go_first(changes: dict[str, Any], kind: type, why: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        backend, without_kernels = choose_backend(EngineConfig(**changes), model(dtype))
        assert type(backend) is kind
        assert without_kernels == why


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_numbers_than_bfloat16_are_gathered(dtype: torch.dtype) -> None:
    backend, why = choose_backend(EngineConfig(), model(dtype))
    assert type(backend) is GatherBackend
    assert why == f"there are none for {dtype} on cpu"


def test_a_machine_without_kernels_gathers_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def library() -> None:
        raise KernelsUnavailable("there is no C compiler")

    monkeypatch.setattr(cpu, "library", library)
    backend, why = choose_backend(EngineConfig(), model(torch.bfloat16))
    assert type(backend) is GatherBackend
    assert why == "there is no C compiler"


@pytest.mark.parametrize(
    ("width", "kind"), [(32, CpuBackend), (16, CpuBackend), (24, GatherBackend)]
)
def test_a_kernel_takes_the_heads_that_it_handles(width: int, kind: type) -> None:
    try:
        cpu.library()
    except KernelsUnavailable as error:
        pytest.skip(f"no kernels on this machine: {error}")
    backend, why = choose_backend(EngineConfig(), model(torch.bfloat16, width))
    assert type(backend) is kind
    assert why == "", "other kernels run also where attention is gathered"
