"""A model that is loaded before a process forks."""

from __future__ import annotations

from pathlib import Path

import torch

from nano_inference import EngineConfig
from nano_inference.stages.executor.runner.loading import load_ranks
from nano_inference.stages.executor.runner.preloaded import preload

from ....programs import run

CONFIG = EngineConfig(dtype="float32")


def test_a_fork_takes_it_once_for_the_same_settings() -> None:
    threads = torch.get_num_threads()
    preload(CONFIG)
    assert torch.get_num_threads() == threads
    _, other = load_ranks(EngineConfig(dtype="bfloat16"))
    assert other.module.dtype == torch.bfloat16
    _, taken = load_ranks(CONFIG)
    _, again = load_ranks(CONFIG)
    assert taken is not again
    first, second = (dict(each.module.named_parameters()) for each in (taken, again))
    assert all(torch.equal(first[name], second[name]) for name in second)


def test_loading_starts_no_thread(tmp_path: Path) -> None:
    """Else the process could not fork."""
    code = """
from nano_inference import EngineConfig
from nano_inference.cli.fork_server import why_not
from nano_inference.stages.executor.runner import preloaded

preloaded.preload(EngineConfig(dtype="float32"))
print(len(preloaded._preloaded), why_not())
"""
    assert run(code, tmp_path).stdout == "1 \n"
