"""The message format of a model, by its tokenizer and its folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from .chat_template import Run, render, template_of
from .conversation import as_read_by, names_read
from .messages import SWITCHES, MessageFormat, find_format
from .messages.recognition import TOOL
from .template_process import render_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MOST_FOUND = 64

_FOUND: dict[str, MessageFormat | None] = {}
"""Formats that were found, by all that decides them."""


def format_of(
    tokenizer: PreTrainedTokenizerFast, folder: Path, asked: str, run: Run = render_template
) -> MessageFormat | None:
    """Return the format of a model's messages; None if it is unknown.

    Args:
        tokenizer: Transformers', with the chat template.
        folder: The model's, with its `config.json`.
        asked: As for `find_format`.
        run: Renders the template, as for `chat_template.render`.

    Raises:
        ConfigError: As `find_format`.
        RequestError: internal_error: templates can't be rendered.
    """
    template = tokenizer.chat_template or ""
    texts = "\n".join(template.values()) if isinstance(template, dict) else template
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    own = getattr(tokenizer, "response_template", None)
    model_type = str(config.get("model_type", ""))
    key = json.dumps((asked, own, texts, model_type), sort_keys=True)
    if key not in _FOUND or asked not in ("auto", "off"):
        found = find_format(asked, own, texts, model_type, writer_of(tokenizer, run))
        while len(_FOUND) >= _MOST_FOUND:
            _FOUND.pop(next(iter(_FOUND)), None)
        _FOUND[key] = found
    return _FOUND[key]


def writer_of(
    tokenizer: PreTrainedTokenizerFast, run: Run = render_template
) -> Callable[[Sequence[Mapping[str, Any]], bool], str]:
    """Return what `find_format` takes to see what a chat template writes."""
    tools = [TOOL.as_templates_read()]

    def written(turns: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        template = template_of(tokenizer, tools)
        return render(
            tokenizer,
            as_read_by(template, map(dict, turns), None),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            variables=dict.fromkeys(names_read(template).intersection(SWITCHES), True),
            run=run,
        )

    return written
