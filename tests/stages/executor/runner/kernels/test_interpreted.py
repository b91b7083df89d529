"""The tests of Triton's kernels, under Triton's interpreter on a CPU.

PyTorch's builds for CPUs come without Triton, so a soak installs it. By hand, where it is
installed: `TRITON_INTERPRET=1 pytest tests/stages/executor/runner/kernels/test_triton_modules.py`.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from .....examples.environments import environment, run

FILES = sorted(Path(__file__).parent.glob("test_triton_*.py"))


@pytest.mark.slow
@pytest.mark.soak(only=True)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kernels_for_cuda_hold_under_the_interpreter(
    file: Path, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    cache: pytest.Cache = pytestconfig.cache  # type: ignore[assignment]
    given = os.environ.get("NANO_TEST_TRITON")
    programs = Path(given or environment("triton", cache.mkdir("clients")))
    (site,) = programs.parent.glob("lib/python*/site-packages")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    output = run(
        command,
        Path(__file__).parents[5],
        limit_s=1800,
        PYTHONPATH=str(site),
        TRITON_INTERPRET="1",
        TMPDIR=str(tmp_path),
    )
    assert re.search(r"^\d+ passed", output, re.M), output
