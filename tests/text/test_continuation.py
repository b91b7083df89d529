"""The text that templates write after an answer."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest

from nano_inference.text.continuation import agrees, last_answer, text_after, with_other_answer

CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
ASKED = {"role": "user", "content": "Add."}
CALLED = {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "five"}
ANSWERED = {"role": "assistant", "content": "It is five."}
AGAIN = {"role": "user", "content": "And now?"}

CHATML = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content and loop.last %}{{ '<think>' + m.reasoning_content }}{% endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}<call>{{ c.function.arguments | tojson }}</call>{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}{{ '<|im_start|>assistant\\n' }}"""

AFTER_ANSWERS_ONLY = """
{%- for m in messages %}{% if m.role == 'assistant' %}<A>{{ m.content }}
{%- for c in m.tool_calls or [] %}<call>{{ c.function.arguments | tojson }}{% endfor %}</s>
{%- else %}<U>{{ m.content }}{% endif %}{% endfor %}<A>"""

CONTENT_OR_CALLS = """
{%- for m in messages %}{{ '<' + m.role + '>' }}
{%- if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}<eom>
{%- else %}{{ m.content }}<eot>{% endif %}{% endfor %}<assistant>"""

OTHER_END = """
{%- for m in messages %}{{ '<' + m.role + '>' + m.content }}
{%- if m.role == 'assistant' %}<end>{% endif %}{% endfor %}<assistant>"""

NOTHING_OF_ANSWERS = """
{%- for m in messages if m.role != 'assistant' %}{{ m.content + '</s>' }}{% endfor %}"""

USERS_ONLY = """
{%- for m in messages %}{{ m.content + ('' if m.role == 'assistant' else '</s>') }}{% endfor %}"""


def after(
    template: str, messages: list[dict[str, Any]], stops: set[str], ended_by: str
) -> str | None:
    place = last_answer(messages)
    assert place is not None
    compiled = jinja2.Environment().from_string(template)
    text = compiled.render(messages=messages)
    other = compiled.render(messages=with_other_answer(messages, place))
    return text_after(text, other, messages[place + 1 :], stops, ended_by)


CHATML_RESULT = "\n<|im_start|>tool\nfive<|im_end|>\n<|im_start|>assistant\n"
CALLING, TALKING = [ASKED, CALLED, RESULT], [ASKED, CALLED, RESULT, ANSWERED, AGAIN]


@pytest.mark.parametrize(
    ("template", "messages", "stops", "ended_by", "expected"),
    [
        (CHATML, CALLING, {"<|im_end|>"}, "<|im_end|>", CHATML_RESULT),
        (CHATML, CALLING, {"<|im_end|>"}, "", f"<|im_end|>{CHATML_RESULT}"),
        (CHATML, CALLING, {"<|im_end|>", "<|endoftext|>"}, "<|im_end|>", CHATML_RESULT),
        (CHATML, CALLING, {"<|im_end|>", "<|endoftext|>"}, "<|endoftext|>", None),
        (
            CHATML,
            TALKING,
            {"<|im_end|>"},
            "<|im_end|>",
            "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (AFTER_ANSWERS_ONLY, CALLING, {"</s>"}, "</s>", "<U>five<A>"),
        (AFTER_ANSWERS_ONLY, TALKING, {"</s>"}, "</s>", "<U>And now?<A>"),
        (CONTENT_OR_CALLS, CALLING, {"<eom>", "<eot>"}, "<eom>", "<tool>five<eot><assistant>"),
        # The model ended its call as an answer: what the template writes there is another token.
        (CONTENT_OR_CALLS, CALLING, {"<eom>", "<eot>"}, "<eot>", None),
        (CONTENT_OR_CALLS, CALLING, {"<eot>"}, "<eot>", None),
        (OTHER_END, TALKING, {"<return>"}, "<return>", None),
        (NOTHING_OF_ANSWERS, TALKING, {"</s>"}, "</s>", None),
        (USERS_ONLY, TALKING, {"</s>"}, "</s>", None),
    ],
)
def test_the_text_after_an_answer_is_certain_or_refused(
    template: str,
    messages: list[dict[str, Any]],
    stops: set[str],
    ended_by: str,
    expected: str | None,
) -> None:
    assert after(template, messages, stops, ended_by) == expected


def test_only_messages_of_others_follow_an_answer() -> None:
    assert last_answer(CALLING) == 1
    assert last_answer(TALKING) == 3
    assert last_answer([ASKED]) is None
    assert last_answer([ASKED, ANSWERED]) is None
    assert last_answer([ANSWERED, AGAIN]) is None


def test_a_message_is_compared_with_what_the_model_wrote() -> None:
    wrote: Any = (("Hi.", "Hm.Hi."), "Hm.", [("add", {"x": 1})])
    echoed = {"content": "Hi. ", "tool_calls": [CALL]}
    for same in (echoed, echoed | {"content": "Hm.Hi."}, echoed | {"reasoning_content": "Hm. "}):
        assert agrees(same, *wrote)
    for other in (
        echoed | {"content": "Ho."},
        echoed | {"tool_calls": []},
        echoed | {"reasoning_content": "No."},
    ):
        assert not agrees(other, *wrote)
