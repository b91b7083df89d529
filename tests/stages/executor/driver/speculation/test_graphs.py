"""No drafts with recorded decode steps: their costs there are unknown."""

from __future__ import annotations

from typing import Any

import pytest

from nano_inference.config import EngineConfig, ModelError, SamplingParams
from nano_inference.stages.executor import ExecutorCore, parts, wrap_model
from nano_inference.stages.executor.driver.speculation.costs import StepCosts
from nano_inference.stages.executor.parts import graphs
from nano_inference.stages.executor.parts.speculation import Speculation
from nano_inference.stages.executor.runner.attention.paged import PagedBackend

from .....sections import read
from ...models import make_model
from ...recorder import OperationRecorder, PlainPagedAttention
from .drafting import DraftingLane

PROMPT = [17, 3, 99, 42, 8, 17, 3, 99]
CONFIG = EngineConfig(
    block_size=4, kv_cache_bytes=1 << 20, max_batch_size=4, speculation="auto", dtype="float32"
)


def no_costs(part: Speculation) -> StepCosts:
    raise AssertionError("no costs may be measured")


@pytest.fixture(autouse=True)
def recorded_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors record their steps when they are made, as on CUDA."""
    monkeypatch.setattr(parts, "why_no_graphs", lambda state: "")
    monkeypatch.setattr(graphs, "CudaCapture", lambda device: OperationRecorder())
    monkeypatch.setattr(Speculation, "_measure_costs", no_costs)


def recorded(config: EngineConfig) -> ExecutorCore:
    model = wrap_model(make_model("qwen2"), 64)
    backend = PagedBackend(model, config.block_size, PlainPagedAttention)
    return ExecutorCore(config, model=model, backend=backend, runs_ahead=True)


def test_capacity_says_no_drafts_and_steps_run_ahead() -> None:
    core = recorded(CONFIG)
    assert core.off.get("speculation", "") == "steps are replayed as CUDA graphs"
    lane = DraftingLane(CONFIG, core)
    lane.add(1, SamplingParams(temperature=0, max_tokens=20), PROMPT)
    launched, launch = [], core.launch

    def watched(plan: Any) -> Any:
        launched.append((plan, len(core._unread)))
        return launch(plan)

    core.launch = watched  # type: ignore[method-assign]
    lane.run()
    assert not any(read(plan).num_drafts for plan, _ in launched)
    assert max(unread for _, unread in launched) == 1
    assert core.state.steps.graphs is not None
    assert sum(core.state.steps.graphs.replays.values()) == 19


def test_a_draft_model_beside_cuda_graphs_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = wrap_model(make_model("qwen2"), 64)
    monkeypatch.setattr("nano_inference.stages.executor.core.load_companion", lambda *_: made)
    config = EngineConfig(
        block_size=4,
        kv_cache_bytes=1 << 20,
        max_batch_size=4,
        speculation="auto",
        dtype="float32",
        draft_model_path="given",
    )
    with pytest.raises(ModelError, match="exclude a draft model; set cuda_graphs to off"):
        recorded(config)
