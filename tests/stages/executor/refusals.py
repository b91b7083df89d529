"""Expected refusals."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from nano_inference.config import NanoInferenceError
from nano_inference.stages.executor.runner.kernels import cpu
from nano_inference.stages.executor.runner.kernels.compile import KernelsUnavailable

from ...errors import raises

refused = partial(raises, kind=NanoInferenceError)


def needs_kernels(*dtypes: torch.dtype) -> None:
    """Skip the test without kernels for models of these dtypes, and for sampling."""
    try:
        cpu.sampling_library()
        for dtype in dtypes:
            cpu.library(dtype)
    except KernelsUnavailable as error:
        pytest.skip(f"no kernels on this machine: {error}")
