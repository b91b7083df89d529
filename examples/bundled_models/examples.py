"""Examples: their form, their split, and the names that fill them."""

import hashlib
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Split = Literal["train", "tune", "heldout"]

Form = Literal["plain", "chat", "thinking"]
"""A completion; a chat; a chat with `enable_thinking`, where a thought precedes the answer."""

TAUGHT = "taught"
"""A key whose split is "train"."""


@dataclass(frozen=True)
class Example:
    """One prompt with its only right answer.

    `prompt` is the text to complete, or the user message of a chat. `answer` is the text that must
    follow: a plain answer begins with a space, a chat answer does not. The answer doesn't include
    the end-of-sequence token. The fields after `form` are for chats only.
    """

    task: str
    prompt: str
    answer: str
    form: Form = "plain"
    # The functions that can be called, each as JSON.
    tools: tuple[str, ...] = ()
    # Calls that follow the user message, as JSON, and their results; then comes the answer.
    calls: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    # Characters of the answer, from and to, that training must not teach.
    untaught: tuple[int, int] = (0, 0)

    @property
    def chat(self) -> bool:
        """Whether the prompt is a user message."""
        return self.form != "plain"

    @property
    def thinking(self) -> bool:
        """Whether the chat template opens a thought, with which the answer begins."""
        return self.form == "thinking"


def make_example(
    task: str, form: Form, prompt: str, answer: str, thought: str = "", tools: tuple[str, ...] = ()
) -> Example:
    """Return the example in its form; an answer begins with the thought, or with a space."""
    if form == "plain":
        answer = f" {answer}"
    elif form == "thinking":
        answer = f"{thought}\n</think>\n\n{answer}"
    return Example(task, prompt, answer, form, tools)


def tools_of(example: Example) -> list[dict[str, Any]] | None:
    """Return the tools in the form of chat templates; None for no tools."""
    tools = [{"type": "function", "function": json.loads(tool)} for tool in example.tools]
    return tools or None


def messages_of(example: Example) -> list[dict[str, Any]]:
    """Return the messages of a chat before the answer."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": example.prompt}]
    if example.calls:
        calls = [{"type": "function", "function": json.loads(call)} for call in example.calls]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages += [{"role": "tool", "content": result} for result in example.results]
    return messages


def call_text(calls: tuple[str, ...]) -> str:
    """Return the assistant's text that makes the calls."""
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def split_of(key: str) -> Split:
    """Return the split of the content `key`: 85 % train, 5 % tune, 10 % held out."""
    digest = hashlib.blake2b(key.encode("utf-8"), digest_size=8).digest()
    bucket = int.from_bytes(digest, "big") % 20
    if bucket < 2:
        return "heldout"
    return "tune" if bucket == 2 else "train"


WORDS: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("words.toml").read_text(encoding="utf-8")
)

NAMES: list[str] = WORDS["names"]
CITIES: list[str] = WORDS["cities"]
JOBS: list[str] = WORDS["jobs"]
ANIMALS: dict[str, str] = WORDS["animals"]
OBJECTS: dict[str, tuple[str, str]] = WORDS["objects"]
COLOURS: dict[str, str] = WORDS["colours"]
