"""How the served model writes its messages."""

from __future__ import annotations

from ...config import Config
from ...text.gguf import folder_of
from ...text.messages import MessageFormat, find_format, format_of
from .words import LazyWords


class LazyFormat:
    """The message format, found when the tokenizer is first needed."""

    def __init__(self, config: Config, words: LazyWords) -> None:
        self._config = config
        self._words = words
        self._found: tuple[MessageFormat | None] | None = None

    async def get(self) -> MessageFormat | None:
        """None where the model has none that is known.

        Raises:
            RequestError: unsupported: there is no tokenizer.
            ConfigError: `gateway.message_format` names none.
        """
        if self._found is None:
            tokenizer = (await self._words.required()).tokenizer
            folder = folder_of(self._config.engine.model_folder)
            asked = self._config.gateway.message_format
            self._found = (format_of(tokenizer, folder, asked),)
        return self._found[0]


def check_format(config: Config) -> None:
    """Raises ConfigError: `gateway.message_format` names none, whatever the model is."""
    find_format(config.gateway.message_format, None, "", "")
