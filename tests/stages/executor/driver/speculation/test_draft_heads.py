"""MTP and EAGLE-3 heads: their drafts by the definition, and the same output with and without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nano_inference.config import EngineConfig, SamplingParams
from nano_inference.stages.executor import ExecutorCore
from nano_inference.stages.executor.driver.speculation import draft_model
from nano_inference.stages.executor.driver.speculation.draft_head import HeadDrafts
from nano_inference.stages.executor.driver.speculation.drafts import Draft, DraftContext
from nano_inference.stages.executor.driver.speculation.speculator import Speculator
from nano_inference.stages.executor.parts.speculation import Speculation

from .....soaking import in_soak
from ...models import VOCAB, make_model
from .drafting import DraftingLane, VerifyAll, assert_same
from .heads import Definition, write_eagle3, write_mtp

pytestmark = pytest.mark.usefixtures("unmeasured")


class HeadLane(DraftingLane):
    """A lane that drafts by a head alone, and keeps its drafts."""

    def __init__(self, folder: Path, head: str, **settings: Any) -> None:
        config = EngineConfig(
            model_path=str(folder),
            draft_model_path=head,
            speculation="auto",
            draft_sources=(),
            block_size=4,
            max_batch_size=6,
            max_model_len=128,
            kv_cache_bytes=1 << 21,
            state_snapshots_bytes=1 << 20,
            max_tokens_per_batch=24,
            max_draft_tokens=5,
            **settings,
        )
        super().__init__(config, ExecutorCore(config), preempt_every=4)
        part = self.core.part(Speculation)
        drafts = part.draft_model
        assert isinstance(drafts, HeadDrafts)
        self.guesses: list[tuple[int, list[int], tuple[int, ...]]] = []
        propose = drafts.propose

        def recorded(contexts: Sequence[DraftContext]) -> list[Draft]:
            found = propose(contexts)
            self.guesses.extend(
                (context.seq_id, context.tokens.tolist(), draft.tokens)
                for context, draft in zip(contexts, found, strict=True)
            )
            return found

        drafts.propose = recorded  # type: ignore[method-assign]
        self.verify(64)

    def verify(self, rows: int) -> None:
        """Verify drafts in steps of so many rows; 0 for no drafts."""
        core, model = self.core, self.core.part(Speculation).draft_model
        speculator = Speculator(core._table, core.constraints, (), VerifyAll(rows), model)
        core.part(Speculation).use(speculator)


def make_lane(tmp_path: Path, name: str) -> tuple[HeadLane, Definition]:
    if name == "eagle3":
        make_model("llama").save_pretrained(tmp_path)
        write_eagle3(head := tmp_path / "head")
        return HeadLane(tmp_path, str(head)), Definition(tmp_path, head)
    write_mtp(tmp_path, name)
    return HeadLane(tmp_path, "mtp"), Definition(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["eagle3", "qwen3_5_text", "deepseek_v3"]
    + [in_soak(each) for each in ("qwen3_next", "qwen3_5_moe_text", "glm4_moe", "glm4_moe_lite")],
)
def test_drafts_are_those_of_the_definition_and_change_nothing(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With chunks, shared prefixes, copied blocks and preemptions, of several sequences."""
    monkeypatch.setattr(draft_model, "_MOST_SKIPPED", 1)
    monkeypatch.setattr(draft_model, "_UNSURE", 0.0)
    lane, definition = make_lane(tmp_path, name)
    rng = np.random.default_rng(0)
    first, second = (rng.integers(1, VOCAB, 37).tolist() for _ in range(2))
    prompts = [first, first[:18] + second[18:], first[:30], second[:1], first]
    samplings = [SamplingParams(temperature=each, max_tokens=24) for each in (0, 1, 0, 0, 0)]
    found = []
    for rows in (64, 0):
        lane.verify(rows)
        for seq_id, (sampling, prompt) in enumerate(zip(samplings, prompts, strict=True), 1):
            lane.add(seq_id, sampling, prompt)
        found.append({**lane.run()})
    assert_same(*found)
    assert lane.preempted > 3
    guesses = [each for each in lane.guesses if each[0] != 2 and each[2]]
    longest = max(len(drafted) for _, _, drafted in guesses)
    assert len(guesses) > 12
    assert longest > 2
    for seq_id, tokens, drafted in guesses:
        # One rounding apart at most.
        assert max(definition.behind_best(tokens, drafted)) < 1e-3, (seq_id, len(tokens))
