"""The formats against llama.cpp's public templates and cases.

For each chat template: the format that is recognised, whether it reads the calls and the reasoning
that the template itself writes, and whether a grammar that requires a call lets them through. For
each case: whether the message that a reader finds is the expected one. Nothing of the checkout is
kept.

    python -m tests.text.messages.public CHECKOUT [--template NAME] [--case NUMBER] [--verbose]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from nano_inference.config import NanoInferenceError
from nano_inference.text.conversation import names_read, render_conversation
from nano_inference.text.messages import (
    SWITCHES,
    MessageFormat,
    MessageReader,
    Reading,
    Tool,
    ToolUse,
    constraint_of,
    find_format,
)
from nano_inference.text.model_format import writer_of

from ..message_writer import Writer
from .cases import Case, Message, calls_of, cases_of

FUNCTIONS = ("test_template_output_peg_parsers",)
TOOL = Tool(
    name="special_function",
    parameters={
        "type": "object",
        "properties": {"arg1": {"type": "integer"}, "note": {"type": "string"}},
        "required": ["arg1"],
    },
)
ARGUMENTS = {"arg1": 1, "note": 'a "b"\nc'}
USER = {"role": "user", "content": "Hey there!"}


class Read(NamedTuple):
    """A message: reasoning and text without the white space around them."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, str], ...]


class Outcome(NamedTuple):
    """A case's result.

    Attributes:
        kind: "same"; "later" if only an unfinished call is not told yet; or "different".
    """

    kind: str
    why: str = ""


# --- templates ----------------------------------------------------------------------------------


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer that has the template, and hardly anything else."""
    plain = Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="", eos_token="")
    tokenizer.chat_template = template
    return tokenizer


def form_of(template: str) -> MessageFormat | None:
    """The format that is recognised, whatever the model's architecture."""
    return find_format("auto", None, template, "", writer_of(tokenizer_of(template)))


def variables_of(template: str, thinking: bool | None) -> dict[str, Any]:
    """The template's switches of reasoning."""
    if thinking is None:
        return {}
    return dict.fromkeys((name for name in SWITCHES if name in names_read(template)), thinking)


def _assistant(reasoning: str, content: str, calls: int) -> dict[str, Any]:
    function = {"name": TOOL.name, "arguments": ARGUMENTS}
    made = [{"id": f"call{n:05}", "type": "function", "function": function} for n in range(calls)]
    turn: dict[str, Any] = {"role": "assistant", "content": content}
    return (
        turn
        | ({"reasoning_content": reasoning} if reasoning else {})
        | ({"tool_calls": made} if made else {})
    )


def written(template: str, form: MessageFormat, turn: dict[str, Any]) -> tuple[str, str]:
    """The opening, and what the template writes for the assistant's turn after it."""
    tokenizer = tokenizer_of(template)
    known = {"placeholder": None, "form": form, "tools": (TOOL,)}
    variables = variables_of(template, "reasoning_content" in turn)
    prompt = render_conversation(tokenizer, [USER], variables=variables, **known)
    whole = render_conversation(
        tokenizer, [USER, turn], variables=variables, add_generation_prompt=False, **known
    ).text
    text, opening = prompt.text, prompt.opening
    while opening and not whole.startswith(text):
        # A template may open the reasoning in the prompt, and write none in the history.
        text, opening = text[:-1], opening[:-1]
    return opening, whole.removeprefix(text) if whole.startswith(text) else whole


def about(template: str, writer: Writer) -> list[str]:
    """A row of the table."""
    form = form_of(template)
    if form is None:
        return ["-", "", "", "", ""]
    row = [form.name]
    for turn in (
        _assistant("", "", 1),
        _assistant("", "", 2),
        _assistant("I think.", "Yes.", 0),
    ):
        if not (form.reads_calls if "tool_calls" in turn else form.reads_reasoning):
            row.append("")
            continue
        try:
            opening, text = written(template, form, turn)
        except NanoInferenceError as error:
            row.append(f"({error.code})")
            continue
        if turn.get("reasoning_content", "") not in text:
            row.append("not written")
            continue
        found = read(form, text, opening, (TOOL,), True)
        calls = tuple(
            (TOOL.name, _sorted(json.dumps(ARGUMENTS))) for _ in turn.get("tool_calls", ())
        )
        right = (found.calls == calls) if calls else found.reasoning == "I think."
        row.append("yes" if right else "NO")
    row.insert(3, _enforced(form, writer))
    return row


def _enforced(form: MessageFormat, writer: Writer) -> str:
    if not form.reads_calls:
        return ""
    if form.calls is None:
        return "can't"
    constraint = constraint_of(form, "", ToolUse(tools=(TOOL,), choice="required"), None)
    tokens, ended = writer.write(constraint, 1)
    found = read(form, writer.text(tokens), "", (TOOL,), True)
    return "yes" if not ended or found.calls else "NO"


# --- cases --------------------------------------------------------------------------------------


def read(
    form: MessageFormat, text: str, opening: str, tools: tuple[Tool, ...], separates: bool,
    *, partial: bool = False,
) -> Read:  # fmt: skip
    """Read a message at once and in pieces by chance, which is the same."""
    reading = Reading(opening=opening, tools=tools, separates_reasoning=separates)
    rng, found = random.Random(0), set()
    for pieces in ([text], list(text), list(_cut(text, rng)), list(_cut(text, rng))):
        reader = MessageReader(form, reading, "")
        deltas = [reader.feed(piece) for piece in pieces]
        if not partial:
            deltas.append(reader.finish())
        found.add(
            Read(
                "".join(delta.reasoning for delta in deltas).strip(),
                "".join(delta.content for delta in deltas).strip(),
                tuple(
                    (call.name, _sorted(call.arguments)) for delta in deltas for call in delta.calls
                ),
            )
        )
    if len(found) > 1 and not partial:
        raise AssertionError(f"cut otherwise it is another message: {found}")
    return found.pop()


def _cut(text: str, rng: random.Random) -> Iterator[str]:
    while text:
        size = rng.randint(1, 7)
        yield text[:size]
        text = text[size:]


def _sorted(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments or "{}"), sort_keys=True)
    except ValueError:
        return arguments


def outcome(case: Case, template: str, form: MessageFormat | None) -> Outcome:
    """The result of a case."""
    asked = case.asked
    tools = tuple(
        Tool(name=name, description=text, parameters=json.loads(schema))
        for name, text, schema in asked.get("tools", ())
    )
    calls = tuple((each["name"], _sorted(each["arguments"])) for each in calls_of(case.expected))
    if tools and (form is None or not form.reads_calls):
        return Outcome("different", "tools are refused")
    separates = not asked.get("reasoning_format", "COMMON_REASONING_FORMAT_NONE").endswith("NONE")
    wanted = Read(case.expected.reasoning_content.strip(), case.expected.content.strip(), calls)
    if form is None:
        return (
            Outcome("same")
            if wanted == Read("", case.text.strip(), ())
            else Outcome("different", "no format")
        )
    try:
        opening, before = _opening(case, template, form, tools)
    except NanoInferenceError as error:
        return Outcome("different", f"the template: {error.message}")
    partial = bool(asked.get("is_partial"))
    text = case.text.removesuffix(_end_of(template, form))
    found = read(form, text, opening, tools, separates, partial=partial)
    whole = Read(
        (before.reasoning_content + found.reasoning).strip(),
        (before.content + found.content).strip(),
        found.calls,
    )
    if whole == wanted or _joined(before, case, form, opening, tools, separates) == wanted:
        return Outcome("same")
    if not separates and opening and (opening + found.content).strip() == wanted.content:
        return Outcome("same")
    if partial and whole == wanted._replace(calls=()):
        return Outcome("later")
    return Outcome("different", f"opening {opening!r}\n  wanted {wanted}\n  found  {whole}")


def _joined(
    before: Message, case: Case, form: MessageFormat, opening: str, tools: tuple[Tool, ...],
    separates: bool,
) -> Read | None:  # fmt: skip
    """The message with the spaces at the place where it is continued."""
    if not (before.content or before.reasoning_content):
        return None
    reader = MessageReader(
        form, Reading(opening=opening, tools=tools, separates_reasoning=separates), ""
    )
    deltas = [reader.feed(case.text), reader.finish()]
    return Read(
        (before.reasoning_content + "".join(delta.reasoning for delta in deltas)).strip(),
        (before.content + "".join(delta.content for delta in deltas)).strip(),
        (),
    )


def _end_of(template: str, form: MessageFormat) -> str:
    """The mark at which a message ends, which is no part of its text."""
    try:
        text = written(template, form, _assistant("", "Yes.", 0))[1]
    except NanoInferenceError:
        return ""
    end = text.rpartition("Yes.")[2].strip()
    return end if end.startswith("<") and end.count("<") == 1 else ""


def _opening(
    case: Case, template: str, form: MessageFormat, tools: tuple[Tool, ...]
) -> tuple[str, Message]:
    """The prompt's part of the message, and what of the message stands in it.

    The begin of a message that is continued is written as its model would write it.
    """
    messages = [Message("user", USER["content"]), *case.asked.get("messages", [])]
    before = Message()
    asked = str(case.asked.get("continue_final_message", ""))
    if asked:
        before = messages.pop()
    if not case.expected.reasoning_content:
        # The template shows none.
        before = Message(content=before.content)
    turns = [_turn(message) for message in messages[1 if len(messages) > 1 else 0 :]]
    opening = render_conversation(
        tokenizer_of(template), turns, placeholder=None, form=form, tools=tools,
        variables=variables_of(template, case.asked.get("enable_thinking", True)),
    ).opening  # fmt: skip
    if before.reasoning_content and form.reasoning is not None:
        if form.reasoning.open.strip() not in opening:
            opening += form.reasoning.open
        opening += before.reasoning_content
        if asked.endswith("CONTENT"):
            opening += form.reasoning.close
    return opening + before.content, before


def _turn(message: Message) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning_content:
        turn["reasoning_content"] = message.reasoning_content
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": json.loads(call["arguments"])},
        }
        for call in calls_of(message)
    ]
    return turn | ({"tool_calls": calls} if calls else {})


# --- the report ---------------------------------------------------------------------------------


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--template", default="", help="only those with this in their names")
    parser.add_argument("--case", type=int, help="only this one")
    parser.add_argument("--verbose", action="store_true", help="show the text of each case")
    given = parser.parse_args()
    templates = {
        f"models/templates/{path.name}": path.read_text()
        for path in sorted((given.checkout / "models/templates").glob("*.jinja"))
        if given.template.lower() in path.name.lower()
    }
    cases = [
        case
        for case in cases_of((given.checkout / "tests/test-chat.cpp").read_text(), FUNCTIONS)
        if case.template in templates and given.case in (None, case.place)
    ]
    lines = [*_of_templates(templates), "", *_of_cases(cases, templates, given.verbose)]
    sys.stdout.write("\n".join(lines) + "\n")


def _of_templates(templates: dict[str, str]) -> Iterator[str]:
    writer = Writer()
    yield f"{'template':54} format            1 call  2 calls enforced reasoning"
    for name, template in templates.items():
        row = about(template, writer)
        yield f"{Path(name).stem:54} {row[0]:17} {row[1]:7} {row[2]:7} {row[3]:8} {row[4]}"


def _of_cases(cases: list[Case], templates: dict[str, str], verbose: bool) -> Iterator[str]:
    forms = {name: form_of(text) for name, text in templates.items()}
    counts: dict[str, Counter[str]] = {}
    kinds: dict[int, set[str]] = {}
    for case in cases:
        found = outcome(case, templates[case.template], forms[case.template])
        counts.setdefault(case.template, Counter())[found.kind] += 1
        kinds.setdefault(case.statement, set()).add(found.kind)
        if found.kind != "same":
            yield f"{case.place} {Path(case.template).stem}: {found.kind}: {found.why}"
            if verbose:
                yield f"  text   {case.text!r}\n  asked  {case.asked.keys()}"
            yield ""
    for name, count in counts.items():
        yield f"{Path(name).stem:54} {dict(count)}"
    yield f"{f'all of {len(cases)}':54} {dict(sum(counts.values(), Counter()))}"
    # A statement is as the worst of its cases, and "different" is the worst.
    worst = Counter(
        min(found, key=("different", "later", "same").index) for found in kinds.values()
    )
    yield f"{f'statements: {len(kinds)}':54} {dict(worst)}"


main()
