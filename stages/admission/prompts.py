"""Prompts and predictions of requests, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ...bus.public import GenerateRequest
from ...config import RequestError, prompt_too_long
from ...text.image_tokens import Expanded, Size
from ...text.tokenizer import check_text_fits, encode
from .checks import check_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from ...text.images import ImageProcessor


class PromptReader(NamedTuple):
    """Reads the prompt and the prediction of a request.

    Attributes:
        tokenizer: None for a model without one; such requests have token ids alone.
        processor: None for a model without images.
        longest_token_bytes: Bytes of the tokenizer's longest token.
    """

    request: GenerateRequest
    tokenizer: PreTrainedTokenizerFast | None
    longest_token_bytes: int
    max_model_len: int
    vocab_size: int
    processor: ImageProcessor | None = None

    def check_prompt(self) -> None:
        """Check the prompt without tokenising it.

        All of a conversation counts, also what the template leaves out.

        Raises:
            RequestError: invalid_prompt, empty_prompt, prompt_too_long.
        """
        request = self.request
        given = [request.prompt, request.prompt_token_ids, request.messages]
        if given.count(None) != 2:
            raise RequestError(
                "give exactly one of prompt, prompt_token_ids and messages", code="invalid_prompt"
            )
        # An embedding needs no token to continue from: the tokenizer may add some to an empty text.
        if not any(given) and (request.embed is None or request.prompt is None):
            raise RequestError(
                "the prompt is empty; give at least one token to continue from", code="empty_prompt"
            )
        if request.prompt is not None:
            self._check_fits(request.prompt)
        elif request.messages is not None:
            if len(request.messages) >= self.max_model_len:
                sent = f"the conversation has {len(request.messages)} messages"
                raise prompt_too_long(self.max_model_len, sent, "send fewer")
            self._check_fits("".join(message.text for message in request.messages))

    def prompt(self, sizes: Sequence[Size] = ()) -> Expanded:
        """Return the prompt, with at least one token, all within the vocabulary. `check_prompt`
        comes before.

        Each placeholder of an image becomes all its tokens: in texts before they are tokenised, as
        Transformers does, since white space may join with its neighbours.

        A text gets the special tokens that the tokenizer adds by default. A conversation goes
        through the model's chat template, with the beginning of the assistant's turn; the template
        writes its special tokens itself, so none are added. As everywhere in Transformers, special
        tokens that are spelled out in a text are read as such.

        Args:
            sizes: Sizes of the prompt's images.

        Raises:
            RequestError: invalid_prompt, empty_prompt, invalid_messages, no_chat_template,
                chat_template_failed, invalid_token_ids, prompt_too_long, images_mismatch.
        """
        request, tokenizer = self.request, self.tokenizer
        ids = request.prompt_token_ids or ()
        if tokenizer is not None and request.prompt is not None:
            text = self._with_images(request.prompt, sizes) if sizes else request.prompt
            special = request.add_special_tokens
            ids = encode(text, tokenizer, add_special_tokens=special, code="invalid_prompt")
        elif tokenizer is not None and request.messages is not None:
            turns: list[dict[str, Any]] = [
                {"role": each.role, "content": msgspec.to_builtins(each.content)}
                for each in request.messages
            ]
            placeholder = self.processor.placeholder if self.processor is not None else None
            from ...text.conversation import render_conversation

            text = render_conversation(tokenizer, turns, placeholder=placeholder).text
            self._check_fits(text)
            if sizes:
                text = self._with_images(text, sizes)
            ids = encode(text, tokenizer, add_special_tokens=False, code="invalid_messages")
        if not ids:
            raise RequestError(
                "the prompt gives no tokens",
                code="empty_prompt",
                remedy="give at least one token to continue from",
            )
        if not sizes:
            if self.processor is not None:
                self.processor.check_no_images(ids)
            check_token_ids("the prompt", ids, self.vocab_size, "invalid_token_ids")
            return Expanded(ids, ())
        assert self.processor is not None, "RequestImages.check comes before"
        # The placeholder's own id may lie outside the vocabulary.
        marks = {self.processor.mark_id, self.processor.placeholder_id}
        others = [token_id for token_id in ids if token_id not in marks]
        check_token_ids("the prompt", others, self.vocab_size, "invalid_token_ids")
        return self.processor.expand(ids, sizes)

    def _with_images(self, text: str, sizes: Sequence[Size]) -> str:
        assert self.processor is not None, "RequestImages.check comes before"
        return self.processor.expand_text(text, sizes)

    def check_prediction(self) -> None:
        """Check the prediction without tokenising it.

        Raises:
            RequestError: invalid_prediction.
        """
        prediction = self.request.prediction
        if isinstance(prediction, str):
            try:
                self._check_fits(prediction)
            except RequestError:
                raise self._too_long(f"{len(prediction)} characters") from None
        elif prediction is not None and len(prediction) > self.max_model_len:
            raise self._too_long(f"{len(prediction)} tokens")

    def prediction(self) -> tuple[int, ...]:
        """Return the prediction's token ids; none without a prediction. `check_prediction` comes
        before.

        A text is tokenised as it stands, without special tokens. After the prompt the model may
        split its first word otherwise, so the tokens are only a hint.

        Raises:
            RequestError: invalid_prediction.
        """
        prediction = self.request.prediction
        if isinstance(prediction, str):
            assert self.tokenizer is not None, "check_no_text comes before"
            code = "invalid_prediction"
            ids = encode(prediction, self.tokenizer, add_special_tokens=False, code=code)
        else:
            ids = prediction or ()
        if len(ids) > self.max_model_len:
            raise self._too_long(f"{len(ids)} tokens")
        check_token_ids("the prediction", ids, self.vocab_size, "invalid_prediction")
        return ids

    def _check_fits(self, text: str) -> None:
        """Raises RequestError: prompt_too_long."""
        # A prompt of an embedding needs no room for a token after it.
        room = 1 if self.request.embed is None else 0
        check_text_fits(text, self.longest_token_bytes, self.max_model_len, room=room)

    def _too_long(self, size: str) -> RequestError:
        return RequestError(
            f"the prediction has {size}, and prompt and completion together may have "
            f"{self.max_model_len} tokens; shorten it",
            code="invalid_prediction",
        )
