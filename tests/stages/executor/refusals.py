"""Expected refusals."""

from __future__ import annotations

import pytest
import torch

from nano_inference.config import NanoInferenceError
from nano_inference.stages.executor.runner.kernels import cpu
from nano_inference.stages.executor.runner.kernels.compile import KernelsUnavailable


def refused(code: str, match: str | None = None) -> pytest.RaisesExc[NanoInferenceError]:
    """A block that is refused with this code."""
    return pytest.RaisesExc(NanoInferenceError, match=match, check=lambda error: error.code == code)


def needs_kernels(*dtypes: torch.dtype) -> None:
    """Skip the test without kernels for models of these dtypes, and for sampling."""
    try:
        cpu.sampling_library()
        for dtype in dtypes:
            cpu.library(dtype)
    except KernelsUnavailable as error:
        pytest.skip(f"no kernels on this machine: {error}")
