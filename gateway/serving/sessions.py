"""Sessions of calls: their names, and prompts that go on by the tokens of their token trees."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from ...bus.public import CompletionSample, GenerateRequest, Session
from ...bus.trees import Turn, check_session_id, read
from ...config import RequestError
from ...store.trees import TreeStore
from ...text.continuation import agrees, last_answer, text_after, with_other_answer
from ...text.conversation import arguments_of
from ...text.messages import MessageFormat, MessageReader, Reading
from ..call import Call
from ..server.http import field_error
from .chat_templates import ChatTemplates, Conversation, Rendered
from .images import sources_in
from .tokenizer import LazyTokenizer, Tokenizer

SESSION_HEADER = "X-Session-ID"
CONTINUE_HEADER = "X-Continue-By-Tokens"
PROMPT_HEADER = "X-Session-Prompt"
"""In the response: whether the prompt was "rendered", or "continued" by tokens."""

_SWITCH = {"true": True, "1": True, "false": False, "0": False}


class _Note(msgspec.Struct, frozen=True, array_like=True):
    """A turn's note: a digest of the conversation, and the answer's part of its prompt."""

    digest: str = ""
    opening: str = ""


class _Answer(NamedTuple):
    """A kept sample that a conversation goes on from."""

    turn: Turn
    sample: CompletionSample


def session_of(call: Call, trees: TreeStore) -> str:
    """Return the session that a call names; "" for none, or where no token trees are kept.

    Raises:
        RequestError: invalid_session.
    """
    if not trees.enabled:
        return ""
    named = call.header(SESSION_HEADER) if call.session is None else call.session
    return check_session_id(named) if named else ""


def with_session(
    call: Call, requests: Sequence[GenerateRequest], trees: TreeStore
) -> list[GenerateRequest]:
    """Return the requests of a call as turns of its session, if it names one.

    Raises:
        RequestError: invalid_session.
    """
    session = session_of(call, trees)
    if not session:
        return list(requests)
    call.account.headers[SESSION_HEADER] = session
    about = Session(id=session, note=call.session_note if len(requests) == 1 else "")
    return [replace(each, session=about) if _samples(each) else each for each in requests]


def _samples(request: GenerateRequest) -> bool:
    """Return whether a request is for tokens, and not for a vector or a prompt's scores."""
    sampling = request.sampling
    scores = sampling.prompt_logprobs is not None and sampling.max_tokens == 1
    return request.embed is None and not scores


class SessionPrompts:
    """Prompts of the calls of sessions."""

    def __init__(
        self,
        trees: TreeStore,
        tokenizer: LazyTokenizer,
        templates: ChatTemplates,
        *,
        continues: bool,
    ) -> None:
        """`continues`: `gateway.continue_by_tokens`."""
        self._trees = trees
        self._tokenizer = tokenizer
        self._templates = templates
        self._continues = continues

    async def render(self, call: Call, conversation: Conversation) -> Rendered:
        """Return the prompt of a conversation, as `ChatTemplates.render`.

        In a session that goes on by tokens, a prompt after a kept answer is made of the kept tokens
        and of what the template writes after the answer.

        Raises:
            RequestError: As `ChatTemplates.render`; invalid_session.
        """
        session = session_of(call, self._trees)
        if not session:
            return await self._templates.render(conversation, call.tenant)
        conversation = self._templates.normal(conversation)
        digest = digest_of(conversation)
        rendered = None
        if digest and _wants(call, self._continues):
            rendered = await self._continued(call, session, conversation)
        call.account.headers[PROMPT_HEADER] = "rendered" if rendered is None else "continued"
        if rendered is None:
            rendered = await self._templates.render(conversation, call.tenant)
        if digest:
            note = _Note(digest, rendered.opening)
            call.session_note = msgspec.json.encode(note).decode()
        return rendered

    async def _continued(
        self, call: Call, session: str, conversation: Conversation
    ) -> Rendered | None:
        """Return the prompt by tokens; None if the conversation goes on from no kept answer, or if
        it is uncertain where the template's text after the answer begins."""
        turns, place = conversation.turns, last_answer(conversation.turns)
        if place is None or conversation.may_be_longer:
            return None
        found = await read(self._trees, call.tenant, session)
        digest = digest_of(replace(conversation, turns=turns[:place]))
        tokenizer, form = await self._tokenizer.required(), await self._tokenizer.message_format()
        answers = _answers(found.turns if found is not None else (), digest)
        answer = next(
            (each for each in answers if _wrote(tokenizer, form, conversation, each, turns[place])),
            None,
        )
        if answer is None:
            return None
        other = replace(conversation, turns=with_other_answer(turns, place))
        try:
            (text, opening), (other_text, _) = await self._templates.texts(
                [conversation, other], call.tenant
            )
        except RequestError:
            return None  # the plain prompt has the error, if it has one
        last = answer.sample.token_ids[-1]
        after = text_after(
            text,
            other_text,
            turns[place + 1 :],
            [tokenizer.token(each) for each in tokenizer.stop_token_ids],
            tokenizer.token(last) if last in tokenizer.stop_token_ids else "",
        )
        if after is None:
            return None
        kept = (*answer.turn.prompt, *answer.sample.token_ids)
        prompt = (*kept, *await self._tokenizer.token_ids(after, add_special=False))
        if len(prompt) >= await self._templates.max_model_len():
            return None
        return Rendered(prompt, opening)


def digest_of(conversation: Conversation) -> str:
    """Return a digest of all that a prompt is rendered of; "" if it has images, or no end that an
    answer follows."""
    if sources_in(conversation.turns) or not conversation.add_generation_prompt:
        return ""
    content = (
        conversation.turns,
        [tool.as_templates_read() for tool in conversation.tools],
        conversation.variables,
        conversation.reasoning,
    )
    encoded = msgspec.json.encode(content, order="deterministic")
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()


def _answers(turns: Sequence[Turn], digest: str) -> Iterator[_Answer]:
    """Yield the answers to a conversation."""
    for turn in turns:
        if digest and _noted(turn).digest == digest:
            yield from (_Answer(turn, each) for each in turn.samples if each.token_ids)


def _noted(turn: Turn) -> _Note:
    try:
        return msgspec.json.decode(turn.note, type=_Note)
    except ValueError:
        return _Note()


def _wrote(
    tokenizer: Tokenizer,
    form: MessageFormat | None,
    conversation: Conversation,
    answer: _Answer,
    message: dict[str, Any],
) -> bool:
    """Return whether a message of a conversation is a kept answer."""
    token_ids, sample = answer.sample.token_ids, answer.sample
    if token_ids[-1] in tokenizer.stop_token_ids:
        token_ids = token_ids[:-1]
    if form is None:
        return agrees(message, (sample.text, tokenizer.text(token_ids, skip_special=True)), "", ())
    text = tokenizer.text(token_ids, skip_special=False)
    opening = _noted(answer.turn).opening
    contents, reasoning, calls = [sample.text], "", list[tuple[str, Any]]()
    for separates in (False, True):
        reading = Reading(opening=opening, tools=conversation.tools, separates_reasoning=separates)
        reader = MessageReader(form, reading, "")
        deltas = [reader.feed(text), reader.finish()]
        contents.append("".join(each.content for each in deltas))
        reasoning = "".join(each.reasoning for each in deltas)
        calls = [
            (call.name, arguments_of(call.arguments)) for each in deltas for call in each.calls
        ]
    return agrees(message, contents, reasoning, calls)


def _wants(call: Call, default: bool) -> bool:
    """Return whether a call's prompts go on by tokens. Raises FieldError: the header is invalid."""
    given = call.header(CONTINUE_HEADER)
    if given is None:
        return default
    if (found := _SWITCH.get(given.strip().lower())) is None:
        raise field_error(CONTINUE_HEADER, "must be true or false", code="invalid_session")
    return found
