"""MTP and EAGLE-3 heads: their drafts by the definition, and the same output with and without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from nano_inference.config import EngineConfig, ModelError, SamplingParams, WeightsError
from nano_inference.stages.executor import ExecutorCore
from nano_inference.stages.executor.driver.speculation import draft_model
from nano_inference.stages.executor.driver.speculation.draft_head import HeadDrafts
from nano_inference.stages.executor.driver.speculation.drafts import Draft, DraftContext
from nano_inference.stages.executor.driver.speculation.speculator import Speculator
from nano_inference.stages.executor.parts import load_companion
from nano_inference.stages.executor.parts.speculation import Speculation
from nano_inference.stages.executor.parts.weights import WeightChanges
from nano_inference.stages.executor.runner.model import load_model, wrap_model

from .....soaking import in_soak
from ...models import VOCAB, make_model
from ...plans import step_plan
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
    for seq_id, tokens, drafted in sorted(guesses, key=lambda each: -len(each[1])):
        # One rounding apart at most.
        assert max(definition.behind_best(tokens, drafted)) < 1e-3, (seq_id, len(tokens))


def test_an_update_that_names_the_head_replaces_it_and_others_leave_it(tmp_path: Path) -> None:
    lane, _ = make_lane(tmp_path, "deepseek_v3")
    core, part = lane.core, lane.core.part(Speculation)
    head: Any = part.draft_model._runner.model.module  # type: ignore[union-attr]
    files = load_file(tmp_path / "model.safetensors")
    before = {name: each.clone() for name, each in head.state_dict().items()}
    changes = core.part(WeightChanges)
    own = {name: each * 2 for name, each in files.items() if name.startswith("model.layers.2.")}
    for tensors, factor in (({"model.norm.weight": files["model.norm.weight"]}, 1), (own, 2)):
        with_norm = tensors | {"model.norm.weight": files["model.norm.weight"]}
        prepared = changes.manager.prepare(with_norm)
        changes.manager.start_sync(prepared, partial=True)
        version = changes.manager.pending_version
        core.execute(step_plan(100 + version, weight_version=version))
        for name, each in head.state_dict().items():
            if each.is_floating_point() and name.startswith(("entry", "model.layers")):
                assert torch.equal(each, before[name] * factor), name
    with pytest.raises(WeightsError, match="the draft head in the new weights"):
        changes.manager.prepare({"model.layers.2.enorm.weight": torch.zeros(3)})


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "hidden states of 64 numbers, and the model of 48"),
        ({"vocab_size": 300}, "it has 300 tokens, and the model 211"),
        ({"num_hidden_layers": 2}, "it has 2 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "after layers 1, 2, 9"),
        ({"d2t": torch.full((150,), 500)}, "its d2t leads to tokens that are none"),
        ({"fc.weight": torch.zeros(48, 96)}, r"'fc.weight' is made \(48, 96\)"),
        (
            {"extra.weight": torch.zeros(3)},
            "does not have, such as 'extra.weight'|extra.weight is not known",
        ),
        ({"midlayer.mlp.up_proj.weight_scale": torch.ones(1)}, "weights are codes"),
    ],
    ids=["width", "vocabulary", "layers", "reads", "d2t", "shape", "unknown", "codes"],
)
def test_an_eagle3_head_that_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_eagle3(tmp_path, **changes)
    config = EngineConfig(draft_model_path=str(tmp_path), speculation="auto", max_model_len=64)
    target = wrap_model(make_model("llama"), 64)
    with pytest.raises(ModelError, match=message):
        ExecutorCore(config, model=target)


def test_a_model_without_a_head_and_a_head_without_a_tensor_are_refused(tmp_path: Path) -> None:
    config = EngineConfig(draft_model_path="mtp", speculation="auto")
    with pytest.raises(ModelError, match="has no MTP head"):
        load_companion(config, load_model(config))
    write_mtp(tmp_path, "qwen3_5_text")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["mtp.layers.0.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    config = msgspec.structs.replace(config, model_path=str(tmp_path))
    with pytest.raises(ModelError, match="lack 1 tensors"):
        load_companion(config, load_model(config))
    with pytest.raises(ModelError, match="set tensor_parallel to 1"):
        load_companion(msgspec.structs.replace(config, tensor_parallel=2), load_model(config))
