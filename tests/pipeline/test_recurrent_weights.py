"""A model with recurrent state: each parameter follows its updates."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from torch import Tensor

from nano_inference import FolderWeights, InferenceEngine, SharedWeights

from ..soaking import in_soak
from ..stages.executor.models import make_model, save
from ..stages.executor.references import generate
from ..stages.executor.report import MAX_DIFFERENCE
from .test_recurrent_state import GREEDY, PROMPT, settings

NEW_TOKENS = 4
PARAMS = replace(GREEDY, max_tokens=NEW_TOKENS)


def update(engine: InferenceEngine, new: Mapping[str, Tensor], way: str, folder: Path) -> None:
    if way == "state dict":
        engine.update_weights(new, partial=True)
    elif way == "folder":
        save_file(dict(new), folder / "model.safetensors")
        engine.update_weights(FolderWeights(str(folder)), partial=True)
    else:
        with SharedWeights(new) as shared:
            engine.update_weights(shared.source, partial=True)


@pytest.mark.parametrize("name", [in_soak("lfm2"), "qwen3_5_text"])
def test_each_parameter_s_update_gives_transformers_logprobs(name: str, tmp_path: Path) -> None:
    """One by one, from each source in turn."""
    model = make_model(name, head_dim=32)
    ways = cycle(("state dict", "folder", "shared memory"))
    with InferenceEngine(settings(save(model, tmp_path / "model"))) as engine:
        (before,) = engine.generate([PROMPT], PARAMS)
        generator = torch.Generator().manual_seed(0)
        for key, parameter in model.named_parameters():
            with torch.no_grad():
                parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))
            update(engine, {key: parameter.detach().clone()}, next(ways), tmp_path)
            (sample,) = engine.generate([PROMPT], PARAMS)
            tokens, logits = generate(model, [list(PROMPT)], NEW_TOKENS)
            wanted = logits.log_softmax(-1).gather(-1, tokens[..., None])[0, :, 0]
            found = torch.tensor(sample.logprobs, dtype=torch.float64)
            assert list(sample.completion_tokens) == tokens[0].tolist(), key
            assert (found - wanted).abs().max() < MAX_DIFFERENCE, key
            assert sample.logprobs != before.logprobs, f"{key} changes nothing"
            before = sample
