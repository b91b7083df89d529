"""LoRA adapters on models with recurrent state: on mixers too, with states of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from nano_inference import InferenceEngine

from ..soaking import in_soak
from ..stages.executor.models import make_model, save
from ..stages.executor.references import generate
from ..stages.executor.runner.adapters.making import make_adapter, merged
from .builders import finish
from .test_recurrent_state import GREEDY, PROMPT, bits, settings

TARGETS = {
    "lfm2": ["in_proj", "out_proj", "q_proj", "w1"],
    "qwen3_5_text": [
        *(f"in_proj_{each}" for each in ("qkv", "z", "b", "a")),
        *("out_proj", "q_proj", "o_proj", "down_proj"),
    ],
}

Bits = list[tuple[list[int], list[float]]]


def run(engine: InferenceEngine, *adapters: str) -> tuple[Bits, int]:
    """Return the bits of one prompt with each adapter, and the computed tokens of prompts."""
    engine._batching.take_counters()
    ids = [engine.add_request(list(PROMPT), GREEDY, adapter=each) for each in adapters]
    samples = sorted(finish(engine), key=lambda sample: ids.index(sample.request_id))
    return bits(samples), engine._batching.take_counters().prefilled


@pytest.mark.parametrize("name", [in_soak("lfm2"), "qwen3_5_text"])
def test_rows_have_merged_tokens_and_bits_and_snapshots_of_their_adapter(
    name: str, tmp_path: Path
) -> None:
    """Beside the base model's and others, alone, from snapshots, and after an update."""
    model, whole = make_model(name, head_dim=32), len(PROMPT)
    # The second is on one layer of a product that the kernels compute together.
    layers = {"one": TARGETS[name], "two": TARGETS[name][:1], "new": TARGETS[name]}
    tokens = {"": generate(model, [list(PROMPT)], 10)[0][0].tolist()}
    for seed, (each, targets) in enumerate(layers.items()):
        adapted = make_adapter(model, seed, tmp_path / each, target_modules=targets)
        tokens[each] = generate(merged(adapted), [list(PROMPT)], 10)[0][0].tolist()
    assert len({*map(tuple, tokens.values())}) == 4
    with InferenceEngine(settings(save(model, tmp_path / "model"))) as engine:
        for each in ("one", "two"):
            engine.load_adapter(each, tmp_path / each)
        together, computed = run(engine, "one", "", "two", "one")
        assert [each for each, _ in together] == [tokens[a] for a in ("one", "", "two", "one")]
        assert computed == 3 * whole, "a prefill is shared with the same adapter alone"
        for index, each in enumerate(("one", "", "two")):
            warm, computed = run(engine, each)
            assert (warm, computed) == ([together[index]], 1)
        engine._batching.cache.flush()
        assert run(engine, "two") == ([together[2]], whole)
        assert run(engine, "one") == ([together[0]], whole)
        assert run(engine, "") == ([together[1]], whole)

        engine.load_adapter("one", tmp_path / "new")
        (new, base), computed = run(engine, "one", "")
        assert (new[0], base) == (tokens["new"], together[1])
        assert computed == whole + 1
        assert run(engine, "one") == ([new], 1)
