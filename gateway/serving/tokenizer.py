"""The gateway's tokenizer, and its view of stop tokens and stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.to_thread

from ...bus.public import CompletionSample
from ...config import ModelError, RequestError, SamplingParams
from ...text.chat_template import Run
from ...text.detokenizer import Detokenizer, TokenPieces
from ...text.images import ImageProcessor
from ...text.longest_token import longest_token_bytes
from ...text.messages import MessageFormat
from ...text.model_folder import folder_of
from ...text.model_format import format_of
from ...text.template_process import render_template
from ...text.tokenizer import (
    check_text_fits,
    encode,
    load_tokenizer,
    special_token_ids,
    stop_token_ids_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

T = TypeVar("T")

_SHORT = 4096
"""Characters, or listed tokens with those of logprobs, that are processed on the event loop."""

READING = 8
"""Cost of reading a token of a message, in tokens that are only listed."""

_THREADS = 2
"""Texts processed beside the event loop at a time. Each keeps a core busy."""


class Tokenizer:
    """A model's tokenizer, with what the gateway needs beside it.

    Attributes:
        transformers: The tokenizer of Transformers.
        stop_token_ids: The tokens that end a generation by default.
        special_tokens: Ids of special tokens by name.
        images: The model's image processor; None if it takes no images.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        stop_token_ids: frozenset[int],
        images: ImageProcessor | None = None,
    ) -> None:
        self.stop_token_ids = stop_token_ids
        self.transformers = tokenizer
        self.images = images
        self.special_tokens = special_token_ids(tokenizer)
        self._longest_token_bytes = longest_token_bytes(tokenizer)
        self._token_texts: dict[int, str] = {}
        self._pieces = {
            skip: TokenPieces(tokenizer.backend_tokenizer, skip_special=skip)
            for skip in (True, False)
        }

    def check_fits(self, text: str, max_model_len: int) -> None:
        """Raises RequestError (prompt_too_long) for a text that can't fit in any case."""
        check_text_fits(text, self._longest_token_bytes, max_model_len)

    def token_ids(self, text: str, *, add_special: bool = True) -> tuple[int, ...]:
        """Return a prompt's tokens, as admission does.

        Args:
            add_special: Whether the tokenizer adds special tokens; a rendered conversation has its
                own.

        Raises:
            RequestError: invalid_prompt.
        """
        return encode(
            text, self.transformers, add_special_tokens=add_special, code="invalid_prompt"
        )

    def text(self, token_ids: Sequence[int], *, skip_special: bool) -> str:
        """Return the text of tokens; special ones are their names, unless they are skipped."""
        detokenizer = self.detokenizer(skip_special=skip_special)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def detokenizer(self, *, skip_special: bool) -> Detokenizer:
        """Return a detokenizer for a text that grows."""
        return Detokenizer(self._pieces[skip_special])

    def token(self, token_id: int) -> str:
        """Return the text of a single token."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = str(self.transformers.decode([token_id]))
        return text

    def special_name(self, token_id: int) -> str:
        """Return a special token's name; "" for any other token."""
        name = self._pieces[False][token_id]
        return name if isinstance(name, str) and not self._pieces[True][token_id] else ""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text, which may be a part of a character."""
        piece = self._pieces[False][token_id]
        return piece if isinstance(piece, bytes) else piece.encode()


class LazyTokenizer:
    """Loads the tokenizer when it is first needed, which takes a second or two."""

    def __init__(
        self, folder: Path, message_format: str = "off", run: Run = render_template
    ) -> None:
        """Args: the model's folder; `gateway.message_format`; and what renders the chat template,
        by which a format is recognised."""
        self._folder = folder
        self._run = run
        self._format_asked = message_format
        self._format: tuple[MessageFormat | None] | None = None
        self._loading = anyio.Lock()
        self._recognising = anyio.Lock()
        self._tokenizer: Tokenizer | None = None
        self._threads = anyio.CapacityLimiter(_THREADS)
        # Grammars have threads of their own, so that they and long texts don't wait for each other.
        self._grammar_threads = anyio.CapacityLimiter(_THREADS)

    async def get(self) -> Tokenizer:
        """Raises ModelError when the folder has no usable tokenizer."""

        def load() -> Tokenizer:
            tokenizer = load_tokenizer(self._folder)
            images: ImageProcessor | None = None
            # Without a usable one admission, too, serves texts.
            with suppress(ModelError):
                images = ImageProcessor.of(self._folder, tokenizer)
            return Tokenizer(tokenizer, stop_token_ids_of(self._folder, tokenizer), images)

        async with self._loading:
            if self._tokenizer is None:
                self._tokenizer = await anyio.to_thread.run_sync(
                    load, limiter=anyio.CapacityLimiter(1)
                )
        return self._tokenizer

    async def required(self) -> Tokenizer:
        """Return the tokenizer for a call that needs it, like `get`.

        Raises:
            RequestError: unsupported.
        """
        try:
            return await self.get()
        except ModelError as error:
            raise RequestError(
                f"this takes the model's tokenizer, which the gateway does not have: "
                f"{error.message}",
                code="unsupported",
            ) from None

    async def message_format(self) -> MessageFormat | None:
        """Return the model's message format; None if it is unknown.

        Raises:
            RequestError: unsupported: there is no tokenizer.
            ConfigError: `gateway.message_format` is unknown.
        """
        tokenizer = (await self.required()).transformers
        async with self._recognising:
            if self._format is None:
                folder = folder_of(self._folder)
                found = partial(format_of, tokenizer, folder, self._format_asked, self._run)
                self._format = (await self.beside(found),)
        return self._format[0]

    async def finds_format(self, template: str) -> Callable[[], MessageFormat | None]:
        """Return what finds the format of the messages that a call's own chat template writes.

        Raises:
            RequestError: unsupported: there is no tokenizer.
        """
        tokenizer, folder = (await self.required()).transformers, folder_of(self._folder)
        return partial(format_of, tokenizer, folder, self._format_asked, self._run, template)

    async def token_ids(self, text: str, *, add_special: bool = True) -> tuple[int, ...]:
        """Return a text's tokens, like `Tokenizer.token_ids`; a long text is tokenized in a thread.

        Raises:
            RequestError: invalid_prompt, unsupported.
        """
        tokenizer = await self.required()
        return await self.process(
            len(text), partial(tokenizer.token_ids, text, add_special=add_special)
        )

    async def beside(self, work: Callable[[], T]) -> T:
        """Run long work in one of a few threads."""
        return await anyio.to_thread.run_sync(work, limiter=self._threads)

    async def process(self, size: int, work: Callable[[], T]) -> T:
        """Process so many characters or listed tokens, many of them in a thread."""
        return await self.beside(work) if size > _SHORT else work()

    async def make_grammar(self, work: Callable[[], T]) -> T:
        """Run work that makes a grammar in one of a few threads."""
        return await anyio.to_thread.run_sync(work, limiter=self._grammar_threads)


def matched_stop(
    sample: CompletionSample, sampling: SamplingParams, tokenizer: Tokenizer | None
) -> int | str:
    """Return the token id or the stop string that ended a sample with the finish reason "stop".

    Args:
        tokenizer: Needed with stop strings.
    """
    if tokenizer is None or is_stop_token(sample.token_ids[-1], sampling, tokenizer):
        return sample.token_ids[-1]
    text = tokenizer.text(sample.token_ids, skip_special=True)
    free = free_of_stops(sample.token_ids, sampling, tokenizer, skip_special=True)
    return first_stop(text[free:], sampling.stop)[0]


def is_stop_token(token_id: int, sampling: SamplingParams, tokenizer: Tokenizer) -> bool:
    """Return whether the last token of a sample with the finish reason "stop" is a stop token."""
    if not sampling.stop:
        return True
    stops = sampling.stop_token_ids
    if not sampling.ignore_eos:
        stops |= tokenizer.stop_token_ids
    return token_id in stops


def free_of_stops(
    token_ids: Sequence[int], sampling: SamplingParams, tokenizer: Tokenizer, *, skip_special: bool
) -> int:
    """Return the length of the text of `min_tokens`, in which stop strings don't count."""
    return len(tokenizer.text(token_ids[: sampling.min_tokens], skip_special=skip_special))


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[str, int]:
    """Return the stop string that is complete first, the longest of several, and its place."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    end, _, stop = min(found, default=(len(text), 0, ""))
    return stop, end - len(stop)
