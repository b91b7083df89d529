"""The reference model: scores of samples, number of passes, and refusals."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nano_inference import EngineConfig
from nano_inference.bus.control import SampleScored, ScoreSample
from nano_inference.config import ModelError
from nano_inference.stages.executor.scoring import ReferenceModel

from ...pipeline import reference

CONFIG = EngineConfig(
    dtype="float32",
    max_model_len=96,
    max_batch_size=4,
    max_tokens_per_batch=32,
    reference_model_path="tiny",
    deterministic=True,
)


@pytest.fixture(scope="module")
def model() -> Iterator[ReferenceModel]:
    loaded = ReferenceModel(CONFIG)
    yield loaded
    loaded.close()


def sample(index: int, num_tokens: int, start: int = 1, temperature: float = 1.0) -> ScoreSample:
    chosen = random.Random(index).choices(range(2, 200), k=num_tokens)
    return ScoreSample("r", "1-0", index, tuple(chosen), start, temperature)


def passes(model: ReferenceModel, *samples: ScoreSample) -> list[tuple[SampleScored, ...]]:
    return list(model.score(samples))


def test_logprobs_are_those_of_a_forward_pass(model: ReferenceModel) -> None:
    asked = [sample(0, 20, start=6), sample(1, 12)]
    ((first, second),) = passes(model, *asked)
    assert (first.request_id, first.entry_id, first.sample_index) == ("r", "1-0", 0)
    for scored, of in ((first, asked[0]), (second, asked[1])):
        token_ids = list(of.token_ids)
        wanted = reference.logprobs(token_ids[: of.start], token_ids[of.start :])
        assert scored.logprobs == pytest.approx(wanted, abs=1e-4)


def test_the_temperature_counts(model: ReferenceModel) -> None:
    ((cold, warm, greedy),) = passes(
        model, sample(0, 9, temperature=0.5), sample(0, 9), sample(0, 9, temperature=0.0)
    )
    assert cold.logprobs != warm.logprobs
    assert greedy.logprobs == warm.logprobs


@pytest.mark.parametrize(
    ("lengths", "wanted"),
    [
        ([10, 10, 10], [3]),
        ([10, 20, 10], [2, 1]),  # a pass takes 32 tokens
        ([32, 2], [1, 1]),
        ([2] * 9, [4, 4, 1]),  # and four samples
        ([5, 96, 5], [1, 0, 0, 1, 1]),  # one that is longer takes several
        ([33], [0, 1]),
    ],
)
def test_samples_share_passes(model: ReferenceModel, lengths: list[int], wanted: list[int]) -> None:
    asked = [sample(index, length) for index, length in enumerate(lengths)]
    together = passes(model, *asked)
    assert [len(each) for each in together] == wanted
    found = [scored for each in together for scored in each]
    assert [scored.sample_index for scored in found] == list(range(len(lengths)))
    alone = [passes(model, each)[-1][0] for each in asked]
    assert found == alone, "the bits depend on no neighbour"


def test_an_abandoned_iteration_leaves_no_state(model: ReferenceModel) -> None:
    (wanted,) = passes(model, sample(1, 9))
    given_up = model.score([sample(0, 90)])
    assert next(given_up) == ()
    assert passes(model, sample(1, 9)) == [wanted]


def test_a_missing_reference_model_is_named(tmp_path: Path) -> None:
    config = EngineConfig(reference_model_path=str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match=r"the reference model: there is no .*nowhere"):
        ReferenceModel(config)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"vocab_size": 10**6, "max_model_len": 96}, "give one with the same tokenizer"),
        ({"vocab_size": 2, "max_model_len": 97}, "set max_model_len to 96"),
    ],
)
def test_a_model_that_can_not_score_all_is_refused(
    model: ReferenceModel, own: dict[str, int], message: str
) -> None:
    core: Any = SimpleNamespace(model=SimpleNamespace(**own))
    with pytest.raises(ModelError, match=message):
        model.check_fits(core)
