"""The choice among a dtype's libraries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from nano_inference.stages.executor.runner.kernels import choose, cpu
from nano_inference.stages.executor.runner.kernels.choose import MOST_INSTRUCTIONS_VARIABLE
from nano_inference.stages.executor.runner.kernels.compile import TILES, KernelsUnavailable, Library


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(MOST_INSTRUCTIONS_VARIABLE, raising=False)
    for each in (cpu._chosen, cpu.sampling_library):
        each.cache_clear()
    yield
    for each in (cpu._chosen, cpu.sampling_library):
        each.cache_clear()


def allow(monkeypatch: pytest.MonkeyPatch, processor: str, *, tiles: bool) -> None:
    """Makes a machine whose processor has these instructions, where Linux allows tiles or not."""

    def load(library: Library) -> Any:
        if not set(library.processor.split()) <= set(processor.split()):
            raise KernelsUnavailable(f"the processor has no {library.needed}")
        loaded = MagicMock(instructions=library.instructions)
        loaded.allow_tiles.return_value = int(tiles)
        return loaded

    monkeypatch.setattr(choose, "load_library", load)


@pytest.mark.parametrize(
    ("processor", "tiles", "chosen"),
    [
        ("avx512f avx512_bf16 amx_bf16 amx_int8", True, "AMX-BF16"),
        ("avx512f avx512_bf16 amx_bf16 amx_int8", False, "AVX512-BF16"),
        ("avx512f avx512_bf16", True, "AVX512-BF16"),
        ("avx512f avx2 fma", True, "AVX2"),
    ],
)
def test_tiles_are_used_where_processor_and_system_have_them(
    monkeypatch: pytest.MonkeyPatch, processor: str, tiles: bool, chosen: str
) -> None:
    allow(monkeypatch, processor, tiles=tiles)
    assert cpu.instructions(torch.bfloat16) == chosen
    assert cpu.instructions(torch.float32) == "AVX-512"


@pytest.mark.parametrize(
    ("most", "chosen"),
    [
        ("", "AMX-BF16"),
        ("AVX512_CORE_BF16", "AVX512-BF16"),
        ("avx512_core_fp16", "AVX512-BF16"),
        ("AVX512_CORE_AMX", "AMX-BF16"),
        ("DEFAULT", "AMX-BF16"),
    ],
)
def test_the_variable_of_onednn_forbids_tiles(
    monkeypatch: pytest.MonkeyPatch, most: str, chosen: str
) -> None:
    allow(monkeypatch, "avx512f avx512_bf16 amx_bf16 amx_int8 avx2 fma", tiles=True)
    monkeypatch.setenv(MOST_INSTRUCTIONS_VARIABLE, most)
    assert cpu.instructions(torch.bfloat16) == chosen
    assert cpu.instructions(torch.float32) == "AVX-512"


@pytest.mark.parametrize("most", ["AVX2", "avx2_vnni", "AVX", "SSE41"])
def test_the_variable_of_onednn_keeps_all_libraries_to_avx2(
    monkeypatch: pytest.MonkeyPatch, most: str
) -> None:
    allow(monkeypatch, "avx512f avx512_bf16 amx_bf16 amx_int8 avx2 fma", tiles=True)
    monkeypatch.setenv(MOST_INSTRUCTIONS_VARIABLE, most)
    assert {cpu.instructions(dtype) for dtype in (torch.bfloat16, torch.float32)} == {"AVX2"}
    assert str(cpu.sampling_library().instructions) == "AVX2"


def test_a_processor_without_avx_512_uses_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, "avx2 fma", tiles=True)
    assert {cpu.instructions(dtype) for dtype in (torch.bfloat16, torch.float32)} == {"AVX2"}
    assert str(cpu.sampling_library().instructions) == "AVX2"


def test_without_kernels_the_missing_instructions_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allow(monkeypatch, "avx2", tiles=True)  # without FMA
    with pytest.raises(KernelsUnavailable, match="the processor has no AVX2 with FMA"):
        cpu.instructions(torch.bfloat16)
    with pytest.raises(KernelsUnavailable, match="there are none for"):
        cpu.instructions(torch.float16)


def test_tiles_are_requested_before_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, TILES.processor, tiles=True)
    _, loaded = cpu._chosen(torch.bfloat16)
    loaded.allow_tiles.assert_called_once_with()  # type: ignore[attr-defined]
