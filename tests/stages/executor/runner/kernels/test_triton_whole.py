"""Whole models on Triton's kernels, as on CUDA: the tokens of the CPU.

With TRITON_INTERPRET=1, where Triton is installed (`test_interpreted.py`). On CUDA `test_cuda.py`
has this with graphs.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from nano_inference.config import EngineConfig, SamplingParams
from nano_inference.stages.executor import ExecutorCore, wrap_model
from nano_inference.stages.executor.runner.fast_modules.calls import join_weights

from ...models import make_model
from ...plans import PROMPT, Generation, Planner
from ...recorder import core_with_kernels

pytest.importorskip("triton", reason="Triton comes with PyTorch's CUDA builds only")

from nano_inference.stages.executor.runner.kernels import triton_modules
from nano_inference.stages.executor.runner.kernels.triton_decode import TritonPagedAttention

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="on a device test_cuda.py has it"
)

CONFIG = EngineConfig(block_size=4, kv_cache_bytes=1 << 20, max_batch_size=4)


def run(core: ExecutorCore) -> list[Generation]:
    """Prompts in chunks, beside sequences that decode."""
    generations = [
        Generation(
            seed,
            PROMPT[: 3 + 2 * seed],
            SamplingParams(temperature=float(seed % 2), max_tokens=5),
            arrives=seed,
            seed=seed,
        )
        for seed in range(3)
    ]
    Planner(core, chunk=4).run(generations)
    return generations


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma2", "gpt_oss"])
def test_the_tokens_are_those_of_the_cpu(
    name: str, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = run(ExecutorCore(CONFIG, model=wrap_model(make_model(name, head_dim=32), 64)))
    module = make_model(name, head_dim=32)
    if joined:
        join_weights(module)
    model = replace(wrap_model(module, 64), is_shared=not joined)
    kernels = triton_modules, TritonPagedAttention
    core = core_with_kernels(monkeypatch, CONFIG, model, *kernels)
    assert core.runner.fast_modules is not None
    assert core.runner.fast_modules.count
    found = run(core)
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
    for ours, other in zip(found, wanted, strict=True):
        assert ours.logprobs == pytest.approx(other.logprobs, abs=1e-3)
