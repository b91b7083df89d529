"""Which of a dtype's libraries is used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from nano_inference.stages.executor.runner.kernels import cpu
from nano_inference.stages.executor.runner.kernels.compile import TILES, KernelsUnavailable, Library


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(cpu.MOST_INSTRUCTIONS_VARIABLE, raising=False)
    cpu._chosen.cache_clear()
    yield
    cpu._chosen.cache_clear()


def allow(monkeypatch: pytest.MonkeyPatch, processor: str, *, tiles: bool) -> None:
    """Makes a machine whose processor has these instructions, where Linux allows tiles or not."""

    def load(library: Library) -> Any:
        if library.processor not in processor.split():
            raise KernelsUnavailable(f"the processor has no {library.instructions}")
        loaded = MagicMock()
        loaded.allow_tiles.return_value = int(tiles)
        return loaded

    monkeypatch.setattr(cpu, "load_library", load)


@pytest.mark.parametrize(
    ("processor", "tiles", "chosen"),
    [
        ("avx512f avx512_bf16 amx_bf16", True, "AMX-BF16"),
        ("avx512f avx512_bf16 amx_bf16", False, "AVX512-BF16"),
        ("avx512f avx512_bf16", True, "AVX512-BF16"),
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
    allow(monkeypatch, "avx512f avx512_bf16 amx_bf16", tiles=True)
    monkeypatch.setenv(cpu.MOST_INSTRUCTIONS_VARIABLE, most)
    assert cpu.instructions(torch.bfloat16) == chosen


def test_without_kernels_the_missing_instructions_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allow(monkeypatch, "avx512f", tiles=True)
    with pytest.raises(KernelsUnavailable, match="the processor has no AVX512-BF16"):
        cpu.instructions(torch.bfloat16)
    with pytest.raises(KernelsUnavailable, match="there are none for"):
        cpu.instructions(torch.float16)


def test_tiles_are_asked_for_before_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, TILES.processor, tiles=True)
    _, loaded = cpu._chosen(torch.bfloat16)
    loaded.allow_tiles.assert_called_once_with()  # type: ignore[attr-defined]
