"""Fixtures of the executor's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from nano_inference.stages.executor import LoadedModel, wrap_model

from .models import make_model
from .report import Results
from .threads import several_threads


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The models are so small that a second thread would only make them slower."""
    with several_threads(1):
        yield


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """A small model whose contexts end at 64 tokens."""
    return wrap_model(make_model("qwen2"), 64)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Each device in turn; CUDA is skipped where there is none."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return str(request.param)


@pytest.fixture(scope="session")
def results(pytestconfig: pytest.Config) -> Iterator[Results]:
    """Collects the tests' measurements; `--write-docs` writes them to docs/models.md at the end."""
    collected = Results()
    yield collected
    if pytestconfig.getoption("--write-docs"):
        collected.write()
