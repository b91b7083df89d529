"""vLLM reads what quantize writes, and chooses the tokens that we choose from it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nano_inference import EngineConfig, InferenceEngine, SamplingParams

from ..examples.environments import environment
from ..examples.environments import run as run_program
from .conftest import Run

PROGRAM = Path(__file__).parents[1] / "examples" / "programs" / "vllm_greedy.py"
PROMPTS = ["98 + 25 =", "12 + 30 =", "7 + 8 ="]
FORMATS = {
    "int4": ["--format", "int4", "--group", "32"],
    "int4 with zero points": ["--format", "int4", "--group", "32", "--zero-points"],
    "int8": ["--activation-bits", "8"],
}
MOST_APART = 0.05

pytestmark = [pytest.mark.slow, pytest.mark.soak]


@pytest.fixture(scope="module")
def python(soak: bool, pytestconfig: pytest.Config) -> Path:
    """Python with vLLM. NANO_TEST_VLLM: the folder of programs of an environment that has it."""
    if not soak:
        pytest.skip("installs packages; run it with --soak")
    cache: pytest.Cache = pytestconfig.cache  # type: ignore[assignment]
    given = os.environ.get("NANO_TEST_VLLM")
    return Path(given or environment("vllm", cache.mkdir("clients"))) / "python"


@pytest.mark.parametrize("name", FORMATS)
def test_vllm_has_our_tokens_and_nearly_our_logprobs(
    name: str, python: Path, run: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    assert run("quantize", "tiny", str(folder), *FORMATS[name]).status == 0
    written = run_program(
        [str(python), str(PROGRAM), str(folder), json.dumps(PROMPTS)],
        tmp_path,
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        HOME=str(tmp_path),
    )
    theirs = json.loads(written.splitlines()[-1])
    config = EngineConfig(model_path=str(folder), dtype="bfloat16")
    sampling = SamplingParams(temperature=0, max_tokens=8)
    with InferenceEngine(config) as engine:
        ours = engine.generate(PROMPTS, sampling)
    for own, other in zip(ours, theirs, strict=True):
        assert list(own.completion_tokens) == other["tokens"]
        pairs = zip(own.logprobs, other["logprobs"], strict=True)
        assert max(abs(one - two) for one, two in pairs) < MOST_APART
