"""Prompts and predictions of requests, as token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ...bus.codec import is_unicode
from ...bus.public import GenerateRequest
from ...config import RequestError, prompt_too_long, shown
from ...text.chat_template import render
from ...text.tokenizer import check_text_fits
from .checks import check_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class TextLimit(NamedTuple):
    """Limits of a text before it is tokenised."""

    longest_token_bytes: int
    max_model_len: int
    room: int = 1

    def check(self, text: str) -> None:
        """Raises RequestError: prompt_too_long."""
        check_text_fits(text, self.longest_token_bytes, self.max_model_len, room=self.room)


def check_prompt(request: GenerateRequest, limit: TextLimit) -> None:
    """Check a prompt without tokenising it.

    All of a conversation counts, also what the template leaves out.

    Raises:
        RequestError: invalid_prompt, empty_prompt, prompt_too_long.
    """
    given = [request.prompt, request.prompt_token_ids, request.messages]
    if given.count(None) != 2:
        raise RequestError(
            "give exactly one of prompt, prompt_token_ids and messages", code="invalid_prompt"
        )
    if not any(given):
        raise RequestError(
            "the prompt is empty; give at least one token to continue from", code="empty_prompt"
        )
    if request.prompt is not None:
        limit.check(request.prompt)
    elif request.messages is not None:
        if len(request.messages) >= limit.max_model_len:
            sent = f"the conversation has {len(request.messages)} messages"
            raise prompt_too_long(limit.max_model_len, sent, "send fewer")
        limit.check("".join(message.content for message in request.messages))


def prompt_token_ids(
    request: GenerateRequest,
    tokenizer: PreTrainedTokenizerFast | None,
    limit: TextLimit,
    *,
    vocab_size: int,
) -> tuple[int, ...]:
    """Return the prompt's token ids, at least one, all within the vocabulary, after `check_prompt`.

    A text gets the special tokens that the tokenizer adds by default. A conversation goes through
    the model's chat template, with the beginning of the assistant's turn; the template writes its
    special tokens itself, so none are added. As everywhere in Transformers, special tokens that
    are spelled out in a text are read as such. Without a tokenizer there
    are token ids alone.

    Raises:
        RequestError: invalid_prompt, empty_prompt, invalid_messages, no_chat_template,
            chat_template_failed, invalid_token_ids, prompt_too_long.
    """
    if tokenizer is None:
        ids = request.prompt_token_ids or ()
    elif request.prompt is not None:
        ids = encode(request.prompt, tokenizer, add_special_tokens=True, code="invalid_prompt")
    elif request.messages is not None:
        turns = [{"role": each.role, "content": each.content} for each in request.messages]
        text = render(tokenizer, turns)
        limit.check(text)
        ids = encode(text, tokenizer, add_special_tokens=False, code="invalid_messages")
    else:
        ids = request.prompt_token_ids or ()
    if not ids:
        raise RequestError("the prompt gives no tokens", code="empty_prompt")
    check_token_ids("the prompt", ids, vocab_size, "invalid_token_ids")
    return ids


def encode(
    text: str, tokenizer: PreTrainedTokenizerFast, *, add_special_tokens: bool, code: str
) -> tuple[int, ...]:
    """Return the token ids of a text.

    Raises:
        RequestError: It can't be read; with this code.
    """
    if not is_unicode(text):
        raise RequestError("the text holds a lone surrogate; send valid Unicode", code=code)
    try:
        # verbose: no warning about lengths, which this stage checks itself.
        encoded = tokenizer(
            text,
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
    # The tokenizers library raises Exception itself, for example for a character that a vocabulary
    # without an "unknown" token lacks.
    except Exception as error:
        raise RequestError(
            f"the model's tokenizer can't read the text: {shown(str(error))}", code=code
        ) from error
    return tuple(encoded["input_ids"])


def check_prediction(request: GenerateRequest, limit: TextLimit) -> None:
    """Check a prediction without tokenising it.

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
    """Return the prediction's token ids, after `check_prediction`; none without a prediction.

    A text is tokenised as it stands, without special tokens. Behind the prompt the model may split
    its first word otherwise, so the tokens are only a hint.

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
    check_token_ids("the prediction", ids, vocab_size, "invalid_prediction")
    return ids


def _too_long(size: str, limit: TextLimit) -> RequestError:
    return RequestError(
        f"the prediction has {size}, and prompt and completion together may have "
        f"{limit.max_model_len} tokens; shorten it",
        code="invalid_prediction",
    )
