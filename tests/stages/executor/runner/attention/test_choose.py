"""The back end that a model gets."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nano_inference.config import ConfigError, EngineConfig, ModelError
from nano_inference.stages.executor import LoadedModel
from nano_inference.stages.executor.runner.attention.choose import choose_backend
from nano_inference.stages.executor.runner.attention.gather import GatherBackend
from nano_inference.stages.executor.runner.attention.paged import CpuBackend
from nano_inference.stages.executor.runner.attention.tiled import TiledBackend
from nano_inference.stages.executor.runner.batch import Rows
from nano_inference.stages.executor.runner.kernels import cpu
from nano_inference.stages.executor.runner.kernels.compile import KernelsUnavailable
from nano_inference.stages.executor.runner.loaded_model import Dtypes, LayerSpec

from ...refusals import needs_kernels


def model(dtype: torch.dtype, width: int = 32) -> LoadedModel:
    config: Any = None
    layers = (LayerSpec(2, width, width, None),)
    return LoadedModel(nn.Module(), config, torch.device("cpu"), Dtypes.of(dtype), 64, 16, layers)


WITH_KERNELS = (torch.float32, torch.bfloat16)
OFF = "engine.kernels is off"


@pytest.mark.parametrize(
    ("changes", "dtypes", "kind", "why"),
    [
        ({"deterministic": True, "attention": "tiled"}, WITH_KERNELS, TiledBackend, ""),
        ({"deterministic": True, "kernels": "off"}, WITH_KERNELS, TiledBackend, OFF),
        ({"kernels": "off"}, WITH_KERNELS, GatherBackend, OFF),
        ({"attention": "gather", "kernels": "off"}, WITH_KERNELS, GatherBackend, OFF),
        ({"attention": "gather"}, WITH_KERNELS, GatherBackend, None),
        ({}, (torch.float16,), GatherBackend, "there are none for torch.float16 on cpu"),
    ],
)
def test_settings_override_the_derived_limits(
    changes: dict[str, Any], dtypes: tuple[torch.dtype, ...], kind: type, why: str | None
) -> None:
    """`why`: there are no kernels; None if that depends on the machine."""
    for dtype in dtypes:
        if why == "":
            needs_kernels(dtype)
        backend, without_kernels = choose_backend(EngineConfig(**changes), model(dtype))
        assert type(backend) is kind
        assert why in (without_kernels, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_takes_every_token(dtype: torch.dtype) -> None:
    """So that its bits don't depend on how the prompt is cut."""
    needs_kernels(dtype)
    backend, without_kernels = choose_backend(EngineConfig(), model(dtype))
    assert (type(backend), without_kernels) == (CpuBackend, "")
    rows = Rows(np.array([0]), np.array([600]), np.arange(38)[None], 0)
    layout = (torch.from_numpy(rows.slots(16)), torch.from_numpy(rows.tables))
    batch = backend.prepare(rows, *layout, torch.from_numpy(rows.contexts))
    assert (batch.decodes.count, bool(batch.prefills)) == (600, False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention": "paged"}, "there are none for torch.float16 on cpu"),
        ({"attention": "paged", "kernels": "off"}, "engine.kernels is off"),
        ({"attention_tile": 64}, "'paged' on CUDA, and this is 'gather' on cpu"),
    ],
)
def test_invalid_or_missing_groups_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        choose_backend(EngineConfig(**changes), model(torch.float16))


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "tiled"},
        {"attention": "gather", "deterministic": True},
        {"attention_tile": 15},
        {"attention_tile": 48},
        {"attention_tile": -16},
        {"attention_tile": 2048},
    ],
)
def test_settings_that_contradict_each_other(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="attention"):
        EngineConfig(**changes)
    assert EngineConfig(attention="tiled", deterministic=True).attention == "tiled"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_encoder_runs_as_it_is(dtype: torch.dtype) -> None:
    encoder = dataclasses.replace(model(dtype), layers=(), generates=False, is_encoder=True)
    assert choose_backend(EngineConfig(), encoder)[1] == "there are none for encoders"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_machine_without_kernels_gathers_and_says_why(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    def library(dtype: torch.dtype) -> None:
        raise KernelsUnavailable("there is no C compiler")

    monkeypatch.setattr(cpu, "library", library)
    backend, why = choose_backend(EngineConfig(), model(dtype))
    assert type(backend) is GatherBackend
    assert why == "there is no C compiler"


@pytest.mark.parametrize(
    ("width", "kind"), [(32, CpuBackend), (16, CpuBackend), (24, GatherBackend)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_takes_the_heads_that_it_handles(
    width: int, kind: type, dtype: torch.dtype
) -> None:
    needs_kernels(dtype)
    backend, why = choose_backend(EngineConfig(), model(dtype, width))
    assert type(backend) is kind
    if kind is CpuBackend:
        asked = EngineConfig(attention="paged")
        assert type(choose_backend(asked, model(dtype, width))[0]) is kind
    else:
        with pytest.raises(ModelError, match="does not support the width"):
            choose_backend(EngineConfig(attention="paged"), model(dtype, width))
    assert why == "", "other kernels run also where attention is gathered"
