"""A model that writes calls and reasoning in Qwen's format, and an engine with given answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from nano_inference.bus.public import FinishReason, GenerateRequest, Output
from nano_inference.config import Config, Constraint, load_config
from nano_inference.gateway.serving.tokenizer import Tokenizer
from nano_inference.text.tokenizer import load_tokenizer, stop_token_ids_of

from .fake import FakeEngine, chunk, completion, sample

TEMPLATE = r"""
{%- for tool in tools or [] %}
    {{- '<|im_start|>system\n' + tool | tojson + '<|im_end|>\n' }}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.reasoning_content %}
        {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
    {%- endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}
        {{- '}\n</tool_call>' }}
    {%- endfor %}
    {%- if message.name %}
        {{- '(' + message.name + ')' }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined %}
        {{- '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def calling_model(folder: Path, source: Path | None = None, *, marks: bool = True) -> Config:
    """Settings with a model like the bundled one, whose template reads tools and thinking.

    Args:
        source: The model's folder; None for the bundled one.
        marks: Whether the marks are tokens of their own; then it has more tokens than the model.
    """
    shutil.copytree(source or Config().engine.model_folder, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    if marks:
        _add_tokens(folder / "tokenizer.json")
    return load_config(
        env={}, overrides={"engine.model_path": str(folder), "gateway.message_format": "qwen"}
    )


def _add_tokens(path: Path) -> None:
    """Add the marks as tokens of their own."""
    found = json.loads(path.read_text())
    added = found["added_tokens"]
    first = max([*found["model"]["vocab"].values(), *(each["id"] for each in added)]) + 1
    names = [name for name in MARKS if name not in {each["content"] for each in added}]
    for token_id, name in enumerate(names, first):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        added.append({"id": token_id, "content": name} | flags)
    path.write_text(json.dumps(found))


def words_of(config: Config) -> Tokenizer:
    """Its tokenizer."""
    folder = config.engine.model_folder
    tokenizer = load_tokenizer(folder)
    return Tokenizer(tokenizer, stop_token_ids_of(folder, tokenizer))


class Model:
    """A fake engine that answers with given texts, and what it was asked for.

    Attributes:
        words: Its tokenizer.
    """

    def __init__(self, engine: FakeEngine, words: Tokenizer) -> None:
        self.engine, self.tokenizer = engine, words

    def says(self, text: str, cut: int = 1, reason: FinishReason = "stop") -> None:
        """From now on answer with this text, in chunks of so many tokens."""
        self.engine.outputs = saying(text, self.tokenizer, cut, reason)

    @property
    def requests(self) -> list[GenerateRequest]:
        return self.engine.requests

    @property
    def constraint(self) -> Constraint | None:
        """That of the last request."""
        return self.requests[-1].sampling.constraint

    def prompt(self, place: int = -1) -> str:
        """The text that a request continues."""
        return self.tokenizer.text(self.requests[place].prompt_token_ids or (), skip_special=False)


def saying(
    text: str, words: Tokenizer, cut: int, reason: FinishReason
) -> Callable[[GenerateRequest], list[Output]]:
    """Outputs with this text, in chunks of so many tokens where a stream is asked for."""
    stop = min(words.stop_token_ids)
    token_ids = words.token_ids(text, add_special=False) + ((stop,) if reason == "stop" else ())
    logprobs = tuple(-1.0 - place / 8 for place in range(len(token_ids)))

    def outputs(request: GenerateRequest) -> list[Output]:
        tops = ((),) * len(token_ids) if request.sampling.logprobs else None
        detokenizer = words.detokenizer(skip_special=True)
        chunks: list[Output] = []
        for first in range(0, len(token_ids) if request.stream else 0, cut):
            here = slice(first, first + cut)
            chunks.append(
                chunk(
                    request,
                    token_ids[here],
                    detokenizer.push(token_ids[here]),
                    token_offset=first,
                    logprobs=logprobs[here],
                    finish_reason=reason if first + cut >= len(token_ids) else None,
                    weight_version=3,
                    top_logprobs=tops and tops[here],
                )
            )
        made = sample(
            token_ids,
            text=words.text(token_ids, skip_special=True),
            logprobs=logprobs,
            finish_reason=reason,
            top_logprobs=tops,
        )
        return [*chunks, completion(request, made)]

    return outputs
