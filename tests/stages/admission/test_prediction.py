"""A client's predicted output: checked, made tokens, and passed on where it is drafted from."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from nano_inference.bus.entries import RequestEntry
from nano_inference.bus.messages import AdmittedRequest
from nano_inference.bus.parts.speculation import Prediction
from nano_inference.bus.public import EmbedParams, GenerateRequest
from nano_inference.config import RequestError
from nano_inference.stages.admission.core import AdmissionCore
from nano_inference.stages.admission.long_prompts import LONG_TEXT, is_long

from ...errors import raises
from .test_core import HUGE, SURROGATE, admit, core_of, entry_of
from .test_embedding import BOTH


@pytest.fixture
def core(tokenizer: PreTrainedTokenizerFast) -> AdmissionCore:
    return core_of(tokenizer, speculation="auto")


def drafted(request: AdmittedRequest) -> tuple[int, ...]:
    found = Prediction.find(request.parts)
    return found.token_ids if found is not None else ()


def test_a_text_becomes_tokens_without_special_ones(
    core: AdmissionCore, tokenizer: PreTrainedTokenizerFast
) -> None:
    request = admit(core, entry_of(prompt="abc", prediction="abc"))
    plain = tuple(tokenizer("abc", add_special_tokens=False)["input_ids"])
    assert drafted(request) == plain
    assert request.prompt.token_ids != plain, "a prompt has special tokens"


def test_token_ids_are_taken_as_they_are(core: AdmissionCore) -> None:
    assert drafted(admit(core, entry_of(prediction=(5, 0, 257)))) == (5, 0, 257)


@pytest.mark.parametrize("prediction", [None, "", ()])
def test_a_prediction_may_be_empty(
    core: AdmissionCore, prediction: str | tuple[int, ...] | None
) -> None:
    assert drafted(admit(core, entry_of(prediction=prediction))) == ()


def test_a_prediction_may_be_as_long_as_the_model(core: AdmissionCore) -> None:
    assert len(drafted(admit(core, entry_of(prediction=(3,) * 100)))) == 100


@pytest.mark.parametrize(
    "prediction",
    [
        pytest.param((3,) * 101, id="too many tokens"),
        pytest.param("a" * 101, id="a text of too many"),
        pytest.param("a" * 100_000, id="a text that is not tokenised to see it"),
        (258,),
        (-1,),
        pytest.param((HUGE,), id="huge"),
        "a" + SURROGATE,
    ],
)
def test_refusals(core: AdmissionCore, prediction: str | tuple[int, ...]) -> None:
    with raises("invalid_prediction") as caught:
        admit(core, entry_of(prediction=prediction))
    assert 10 < len(caught.value.message.encode()) < 400


def test_a_text_that_the_tokenizer_can_not_read(word_tokenizer: PreTrainedTokenizerFast) -> None:
    with raises("invalid_prediction"):
        admit(core_of(word_tokenizer), entry_of(prompt_token_ids=(1,), prediction="blue"))


@pytest.mark.parametrize("tokens", [0, 1, 2**63 - 1, None])
def test_max_draft_tokens_in_range_is_accepted(core: AdmissionCore, tokens: int | None) -> None:
    assert admit(core, entry_of(max_draft_tokens=tokens)).sampling.max_draft_tokens == tokens


@pytest.mark.parametrize("tokens", [-1, pytest.param(HUGE, id="huge")])
def test_max_draft_tokens_out_of_range_is_refused(core: AdmissionCore, tokens: int) -> None:
    with raises("invalid_max_draft_tokens"):
        admit(core, entry_of(max_draft_tokens=tokens))


def test_without_a_tokenizer_only_token_ids_are_taken() -> None:
    core = core_of(None, speculation="auto")  # type: ignore[arg-type]
    prompt: dict[str, Any] = {"prompt_token_ids": (1,)}
    assert drafted(admit(core, entry_of(**prompt, prediction=(5,)))) == (5,)
    with raises("no_tokenizer"):
        admit(core, entry_of(**prompt, prediction="abc"))


@pytest.mark.parametrize(
    ("engine", "fields"),
    [
        ({"speculation": "off"}, {}),
        ({"speculation": "auto", "draft_sources": ("ngram",)}, {}),
        ({"speculation": "auto"}, {"max_draft_tokens": 0}),
    ],
)
def test_a_prediction_is_checked_and_dropped_where_drafts_are_off(
    tokenizer: PreTrainedTokenizerFast, engine: dict[str, Any], fields: dict[str, Any]
) -> None:
    core = core_of(tokenizer, **engine)
    assert drafted(admit(core, entry_of(prediction=(5, 6), **fields))) == ()
    with pytest.raises(RequestError, match="prediction"):
        admit(core, entry_of(prediction=(258,), **fields))


def test_a_long_prediction_is_tokenised_apart(core: AdmissionCore) -> None:
    for prediction, apart in (("a" * LONG_TEXT, True), ("a", False), ((3,) * LONG_TEXT, False)):
        assert is_long(entry_of(prediction=prediction)) is apart
    assert not core.may_fit(entry_of(prediction="a" * LONG_TEXT)), "it is refused at once"


def test_a_prompts_vector_takes_no_prediction(core: AdmissionCore) -> None:
    request = GenerateRequest(prompt_token_ids=(5,), embed=EmbedParams(), prediction=(6,))
    core.set_capacity(BOTH)
    with raises("invalid_embed"):
        core.admit(RequestEntry("7-0", request), 0, 0)
