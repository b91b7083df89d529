"""The required form of a message, as a grammar: calls by their schemas, an answer by its own,
reasoning before either.

A grammar sees a message as the reader does. Text goes on until a mark begins something else, and
what has begun is complete when its own end comes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from transformers.utils.chat_parsing.response_templates import load_response_template

from ...config import Constraint, RequestError
from .call_rules import CallRules, unsupported
from .lark import SPACE, Grammar, answer_of, quoted, up_to, without
from .message_format import MessageFormat, ReasoningSyntax
from .regions import CONTENT, REASONING, UNOPENED, MessageRegions, region_template
from .tools import ToolUse

_NO_TOKENS: Mapping[str, int] = {}


def constraint_of(
    form: MessageFormat | None,
    opening: str,
    use: ToolUse,
    answer: Constraint | None,
    reasoning_budget: int | None = None,
    special_tokens: Mapping[str, int] = _NO_TOKENS,
    *,
    reasoning_asked: bool | None = None,
) -> Constraint | None:
    """Return the constraint of a message; None without one.

    Args:
        form: The model's message format.
        opening: The part of the assistant's turn in the prompt, as in `Reading`.
        use: The tools that it may, or has to, call.
        answer: The constraint of the text, unless it is a call.
        reasoning_budget: Tokens that the reasoning may have between its marks; None for no limit.
            A limit above 0 requests reasoning if `reasoning_asked` is None.
        special_tokens: Ids, by name, of the tokenizer's tokens that no other tokens can spell in a
            grammar.
        reasoning_asked: Whether the caller requested reasoning; None if it did not say. Unless it
            did, the grammar has none where the prompt has not begun any: a grammar that allows
            the opening mark makes models reason that would not without it, since the mark is then
            one of few tokens that may come first.

    Raises:
        RequestError: unsupported: the model's format does not say how it writes such a thing;
            invalid_constraint: the answer can't be described.
    """
    kind = _kind(use, answer, form)
    if reasoning_asked is False and reasoning_budget is not None:
        reasoning_budget = 0
    if kind == "anything" and reasoning_budget is None:
        return None
    if form is None:
        if kind == "answer" and reasoning_budget is None:
            return answer
        raise RequestError(
            "how this model writes calls and reasoning is not known; set gateway.message_format",
            code="unsupported",
        )
    state = _reasoning_state(form, opening)
    # A budget of 0 is a grammar by itself, which forbids the mark wherever it could come.
    if state == "possible" and not reasoning_asked and reasoning_budget is None:
        state = "closed"
    if reasoning_budget is not None and form.reasoning is None:
        raise unsupported(form, "has no reasoning, so that it can't be given a budget")
    if state == "closed" and (kind == "anything" or (kind == "answer" and not form.answer_open)):
        return answer
    message = _Message(form, opening, special_tokens)
    spaced = kind not in ("anything", "text and calls")
    try:
        parts = message.reasoning(state, reasoning_budget, spaced=spaced)
        return Constraint(lark=message.grammar([*parts, message.body(kind, use, answer)]))
    except RecursionError:
        raise RequestError(
            "a schema is nested too deeply; make it flatter", code="invalid_constraint"
        ) from None


_Kind = Literal["anything", "answer", "calls", "answer or calls", "text and calls"]
_State = Literal["closed", "open", "possible"]


def _kind(use: ToolUse, answer: Constraint | None, form: MessageFormat | None) -> _Kind:
    if use.named or use.choice == "required":
        return "calls"
    if answer is not None:
        return "answer or calls" if use.usable else "answer"
    if any(tool.strict for tool in use.usable):
        return "text and calls"
    writes = form is not None and form.calls is not None
    return "text and calls" if use.usable and writes and not use.parallel else "anything"


def _reasoning_state(form: MessageFormat, opening: str) -> _State:
    """Return whether reasoning has begun at the end of the prompt."""
    if form.reasoning is None:
        return "closed"
    regions = MessageRegions(region_template(form.response_template, with_calls=False), opening)
    # Any character, since a mark at the very end might still grow.
    pieces = [*regions.opening, *regions.feed("\0")]
    if regions.field in REASONING:
        return "open"
    if any(each.field in (*REASONING, UNOPENED) for each in pieces):
        return "closed"
    text = "".join(each.text for each in pieces if each.field == CONTENT and each.kind == "text")
    return "closed" if text.strip("\0 \t\r\n") else "possible"


class _Message:
    """The parts of a message as rules."""

    def __init__(
        self, form: MessageFormat, opening: str, special_tokens: Mapping[str, int]
    ) -> None:
        self._form = form
        self._rules = Grammar(special_tokens)
        self._literal = self._rules.literal
        self._opening = opening
        self._answer_open = "" if form.answer_open in opening else form.answer_open

    def grammar(self, parts: Sequence[str]) -> str:
        """Return the grammar of a message of some parts."""
        self._rules.rule("start", " ".join(parts))
        return self._rules.text()

    # --- reasoning -------------------------------------------------------------------------------

    def reasoning(self, state: _State, budget: int | None, *, spaced: bool) -> list[str]:
        """Return the rules of reasoning.

        Args:
            spaced: Whether white space may follow.
        """
        syntax = self._form.reasoning
        if syntax is None or state == "closed" or (state == "possible" and budget == 0):
            return []
        rest = self._rest_of_reasoning(syntax, budget)
        if spaced and self._takes_space(syntax.close):
            rest += f" {self._rules.rule('SPACE', SPACE)}?"
        if state == "open":
            return [rest]
        begin = self._literal(syntax.open.strip("\n"))
        return [f"{self._rules.rule('reasoning', f'{begin} {rest}')}?"]

    def _rest_of_reasoning(self, syntax: ReasoningSyntax, budget: int | None) -> str:
        """Return the rule of reasoning after its opening mark, up to the closing mark with any
        white space before it."""
        close = syntax.close.strip("\n")
        token = self._rules.first_token(close)
        if token is None:
            if budget is not None:
                raise self._no_token(close)
            if not syntax.ends:
                return self._rules.rule("thought[lazy]", up_to(close))
            text = self._rules.rule("THOUGHT", without(*map(re.escape, (close, *syntax.ends))))
            return self._rules.rule("thought[lazy]", f"{text} {quoted(close)}")
        end = self._literal(close[token.start() :])
        if budget == 0:
            return end
        name = "THOUGHT" if budget is None else f"thought[max_tokens={budget}]"
        return f"{self._rules.rule(name, without(*map(re.escape, (close, *syntax.ends))))} {end}"

    def _takes_space(self, close: str) -> bool:
        """Return whether white space after the reasoning belongs to the mark for the reader."""
        fields = load_response_template(self._form.response_template).fields
        found = next(fields[name].close_re for name in REASONING if name in fields).search(
            f"{close}\n"
        )
        return found is not None and found[0].endswith("\n")

    def _no_token(self, mark: str) -> RequestError:
        return unsupported(
            self._form,
            f"marks reasoning with {mark!r}, for which the tokenizer has no token, so that no "
            "budget can be kept",
        )

    # --- after it --------------------------------------------------------------------------------

    def body(self, kind: _Kind, use: ToolUse, answer: Constraint | None) -> str:
        """Return the rule of the text after the reasoning."""
        if kind == "anything":
            return self._anything(use)
        if kind == "answer":
            assert answer is not None
            return self._answer(answer)
        calls = CallRules(self._rules, self._form, use, self._opening)
        if kind == "calls":
            return calls.calls()
        if kind == "text and calls":
            return self._text_and_calls(calls)
        assert answer is not None
        if calls.are_bare():
            calls.check_answer(answer)
            return f"({calls.bare_calls()} | {self._answer(answer)})"
        return f"({calls.calls()} | {self._answer(answer)})"

    def _answer(self, answer: Constraint) -> str:
        body = f"{self._literal(self._answer_open)} {answer_of(answer)}"
        return self._rules.rule("answer", body)

    def _text_and_calls(self, calls: CallRules) -> str:
        reasoning = self._form.reasoning
        marks = [re.escape(reasoning.open.strip("\n"))] if reasoning is not None else []
        text = self._rules.rule("TEXT", without(*calls.patterns(), *marks))
        if not self._answer_open:
            return calls.text_and_calls(text)
        return f"({self._literal(self._answer_open)} {text}? | {calls.calls()})"

    def _anything(self, use: ToolUse) -> str:
        """Return the rule of any tokens, except those that begin more reasoning."""
        assert self._form.reasoning is not None
        mark = self._form.reasoning.open.strip("\n")
        token = self._rules.first_token(mark)
        if token is None or token.start() != 0:
            raise self._no_token(mark)
        rest = f"<[^{self._rules.token_id(token[0])}]>*"
        begins = [self._answer_open]
        if use.usable and self._form.calls is not None:
            begins.append(CallRules(self._rules, self._form, use, self._opening).begin)
        # Other parts may begin with the same token.
        if not any(begin.startswith(token[0]) for begin in begins):
            return rest
        return f"({' | '.join(self._literal(begin) for begin in begins if begin)}) {rest}"
