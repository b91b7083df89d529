"""What a client expects to come: checked, and made tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...bus.public import GenerateRequest
from ...config import RequestError, shown
from .prompts import TextLimit, encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def check_prediction(request: GenerateRequest, limit: TextLimit) -> None:
    """All that can be told of a prediction without tokenising it.

    Raises:
        RequestError: invalid_prediction.
    """
    prediction = request.prediction
    if isinstance(prediction, str):
        try:
            limit.check(prediction)
        except RequestError:
            raise _too_long(f"{len(prediction)} characters", limit) from None
    elif prediction is not None and len(prediction) > limit.max_model_len:
        raise _too_long(f"{len(prediction)} tokens", limit)


def prediction_token_ids(
    request: GenerateRequest,
    tokenizer: PreTrainedTokenizerFast | None,
    limit: TextLimit,
    *,
    vocab_size: int,
) -> tuple[int, ...]:
    """The prediction as tokens, after `check_prediction`; none where there is no prediction.

    A text is tokenised as it stands, without special tokens. The model may cut its first word
    otherwise, where that goes on from the prompt: so what comes of it is only a hint.

    Raises:
        RequestError: invalid_prediction.
    """
    prediction = request.prediction
    if isinstance(prediction, str):
        assert tokenizer is not None, "check_no_text comes before"
        ids = encode(prediction, tokenizer, add_special_tokens=False, code="invalid_prediction")
    else:
        ids = prediction or ()
    if len(ids) > limit.max_model_len:
        raise _too_long(f"{len(ids)} tokens", limit)
    bad = [token_id for token_id in ids if not 0 <= token_id < vocab_size]
    if bad:
        raise RequestError(
            f"the prediction holds token id {shown(bad[0])}; the model's are 0 to {vocab_size - 1}",
            code="invalid_prediction",
        )
    return ids


def _too_long(size: str, limit: TextLimit) -> RequestError:
    return RequestError(
        f"the prediction has {size}, and prompt and completion together may have "
        f"{limit.max_model_len} tokens; shorten it",
        code="invalid_prediction",
    )
