"""The message format of a model, by its tokenizer and its folder."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..config import RequestError
from .chat_template import Run, render, template_of
from .conversation import as_read_by, names_read
from .messages import SWITCHES, MessageFormat, find_format
from .messages.recognition import TOOL
from .template_process import render_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MOST_FOUND = 64

_MOST_WRITTEN = 1 << 15
"""Characters of a conversation by which a call's own template is recognised."""

_FOUND: dict[str, tuple[MessageFormat | None]] = {}
"""Formats that were found, by all that decides them."""

_LOCK = threading.Lock()


def format_of(
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    asked: str,
    run: Run = render_template,
    given: str | None = None,
) -> MessageFormat | None:
    """Return the format of a model's messages; None if it is unknown.

    Args:
        tokenizer: Transformers', with the chat template.
        folder: The model's, with its `config.json`.
        asked: As for `find_format`.
        run: Renders the template, as for `chat_template.render`.
        given: The call's own template; None for the model's.

    Raises:
        ConfigError: As `find_format`.
        RequestError: internal_error: templates can't be rendered.
    """
    template = given or tokenizer.chat_template or ""
    texts = "\n".join(template.values()) if isinstance(template, dict) else template
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    own = getattr(tokenizer, "response_template", None)
    model_type = str(config.get("model_type", ""))
    key = json.dumps((asked, own, texts, model_type, given is None), sort_keys=True)
    with _LOCK:
        kept = _FOUND.get(key)
    if kept is not None and asked in ("auto", "off"):
        return kept[0]
    found = find_format(asked, own, texts, model_type, writer_of(tokenizer, run, given))
    with _LOCK:
        while len(_FOUND) >= _MOST_FOUND:
            del _FOUND[next(iter(_FOUND))]
        _FOUND[key] = (found,)
    return found


def writer_of(
    tokenizer: PreTrainedTokenizerFast, run: Run = render_template, given: str | None = None
) -> Callable[[Sequence[Mapping[str, Any]], bool], str]:
    """Return what `find_format` takes to see what a chat template writes."""
    tools = [TOOL.as_templates_read()]
    failure: RequestError | None = None

    def written(turns: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        nonlocal failure
        # A template that takes its whole time is not run again and again.
        if failure is not None:
            raise failure
        template = template_of(tokenizer, tools, given)
        try:
            text = render(
                tokenizer,
                as_read_by(template, map(dict, turns), None),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                variables=dict.fromkeys(names_read(template).intersection(SWITCHES), True),
                template=given,
                run=run,
            )
            # Every format reads it.
            if given is not None and len(text) > _MOST_WRITTEN:
                raise RequestError(
                    f"the call's chat template writes {len(text)} characters for two short turns",
                    code="chat_template_failed",
                    remedy="make it shorter",
                )
        except RequestError as error:
            if given is not None and error.code == "chat_template_failed":
                failure = error
            raise
        return text

    return written
