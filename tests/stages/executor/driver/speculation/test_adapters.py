"""Drafts for samples with adapters, beside logprobs of prompts and of the model's own output."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import pytest

from nano_inference.bus.messages import StepPlan, StepResult
from nano_inference.config import EngineConfig, SamplingParams
from nano_inference.stages.executor import ExecutorCore, wrap_model
from nano_inference.stages.executor.runner.adapters.peft import AdapterLimits, read_adapter

from ...models import make_model
from ...plans import PROMPT
from ...runner.adapters.making import make_adapter
from .drafting import CONFIG, DraftingLane, Row

pytestmark = pytest.mark.usefixtures("unmeasured")
ADAPTERS = ("", "a0", "a1", "a0", "")
NUM_TOKENS = 40


class Scored(DraftingLane):
    """Also records prompt logprobs."""

    def __init__(self, config: EngineConfig, core: ExecutorCore) -> None:
        super().__init__(config, core)
        self.prompts: dict[int, list[float]] = {}

    def record(self, plan: StepPlan, result: StepResult) -> None:
        super().record(plan, result)
        for scored in result.prompt_logprobs:
            self.prompts.setdefault(scored.seq_id, []).extend(scored.logprobs)


def run(
    folder: Path,
    mode: Literal["processed", "raw"],
    drafts: tuple[dict[int, list[Row]], float] | None = None,
) -> Scored:
    config = msgspec.structs.replace(
        CONFIG,
        deterministic=True,
        logprobs_mode=mode,
        speculation="off" if drafts is None else "auto",
    )
    made = make_model("qwen2")
    core = ExecutorCore(config, model=wrap_model(made, 64))
    for seed in range(2):
        path = folder / str(seed)
        make_adapter(make_model("qwen2"), seed, path)
        core.adapters.put(read_adapter(f"a{seed}", 1, str(path), core.model, AdapterLimits()))
    lane = Scored(config, core)
    if drafts is not None:
        lane.draft(*drafts)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, logprobs=2, prompt_logprobs=1)
    for seq_id, adapter in enumerate(ADAPTERS, 1):
        lane.add(seq_id, sampling, PROMPT[: 4 + seq_id], adapter)
    lane.run()
    return lane


@pytest.mark.parametrize("mode", ["processed", "raw"])
def test_drafts_leave_every_bit(tmp_path: Path, mode: Literal["processed", "raw"]) -> None:
    expected = run(tmp_path, mode)
    lane = run(tmp_path, mode, (expected.found, 0.8))
    assert lane.accepted > 50
    assert lane.found == expected.found
    assert lane.prompts == expected.prompts
    assert {seq_id: len(scored) for seq_id, scored in lane.prompts.items()} == {
        seq_id: 3 + seq_id for seq_id in range(1, 6)
    }
