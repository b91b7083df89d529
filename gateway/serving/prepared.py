"""Preparation of a conversation: its prompt, its constraint, and how its answer is read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal, NamedTuple

from msgspec.structs import replace

from ...bus.public import GenerateRequest, ImageInput
from ...config import NanoInferenceError, SamplingParams, shown
from ...text.enforced_schema import IGNORING
from ...text.grammar import check_size
from ...text.messages import MessageFormat, Reading, ToolUse, constraint_of
from ..call import Call
from ..server.http import FieldError, connected, field_error
from .chat_templates import Conversation, reasoning_asked
from .fields import ignore
from .images import sources_in
from .services import Services

_OF_ARGUMENTS = re.compile(
    r"\d\(\d+\): (?:failed to compile JSON schema: )?(?P<why>[^`]*), in `arguments_(?P<place>\d+):"
)
"""A message about a grammar's rule, as `text.messages` names those of tools by their places."""


class Prepared(NamedTuple):
    """A conversation ready to submit.

    Attributes:
        prompt: Tokens; with images a text.
        sampling: With the constraint that follows from tools, format and reasoning budget.
        form: The model's message format; None if it is unknown.
        reading: The reading of the answer; None for plain text.
        images: Images of the prompt.
    """

    prompt: str | tuple[int, ...]
    sampling: SamplingParams
    form: MessageFormat | None
    reading: Reading | None
    images: tuple[ImageInput, ...] = ()


async def check_length(
    services: Services, request: GenerateRequest, *, as_tokens: bool = False
) -> None:
    """Refuse a request that can't fit, without reading its text.

    Args:
        as_tokens: As in `as_submitted`.

    Raises:
        RequestError: prompt_too_long, request_too_large, unsupported.
    """
    length = await services.length.get()
    services.submissions.check_size(request, length)
    if as_tokens and request.prompt is not None:
        (await services.tokenizer.required()).check_fits(request.prompt, length)


async def truncated(
    services: Services,
    prompt: str | tuple[int, ...],
    most: int,
    max_tokens: int = 0,
    *,
    side: Literal["left", "right"] = "left",
    add_special: bool = True,
) -> tuple[int, ...]:
    """Return at most so many tokens of a prompt.

    Args:
        most: -1: as many as the model's length leaves beside `max_tokens`, at least one.
        side: The side on which tokens are dropped.
        add_special: As of `Tokenizer.token_ids`.

    Raises:
        FieldError: truncate_prompt_tokens is 0.
    """
    if not most:
        raise field_error(
            "truncate_prompt_tokens", "is 0; give at least one token", code="empty_prompt"
        )
    if isinstance(prompt, str):
        prompt = await services.tokenizer.token_ids(prompt, add_special=add_special)
    if most < 0:
        most = max(1, await services.length.get() - max_tokens)
    return prompt[-most:] if side == "left" else prompt[:most]


async def as_submitted(
    services: Services, request: GenerateRequest, *, as_tokens: bool = False
) -> GenerateRequest:
    """Return a request of a checked length as it is submitted.

    Args:
        as_tokens: Whether a text becomes tokens here, which the answer names.

    Raises:
        RequestError: request_too_large, invalid_prompt, unsupported.
    """
    if as_tokens and request.prompt is not None:
        if request.images:
            token_ids = await services.images.expand(
                services.tokenizer,
                request.prompt,
                request.images,
                request.tenant,
                add_special=request.add_special_tokens,
            )
        else:
            token_ids = await services.tokenizer.token_ids(
                request.prompt, add_special=request.add_special_tokens
            )
        request = replace(request, prompt=None, prompt_token_ids=token_ids)
    services.submissions.check_encoded(request)
    return request


async def check_request(
    services: Services, request: GenerateRequest, *, as_tokens: bool = False
) -> GenerateRequest:
    """Refuse a request that the bus or admission would refuse; return it as it is submitted.

    Arguments and errors are those of `check_length` and `as_submitted`. Other calls run in between,
    so that one with many prompts may check them in a loop.
    """
    await check_length(services, request, as_tokens=as_tokens)
    return await as_submitted(services, request, as_tokens=as_tokens)


async def prepare(
    call: Call,
    services: Services,
    conversation: Conversation,
    use: ToolUse,
    sampling: SamplingParams,
    *,
    reasoning_budget: int | None = None,
    separates_reasoning: bool = True,
    budget_param: str = "thinking_token_budget",
) -> Prepared:
    """Render the conversation of a call, and derive the constraint of its answer.

    Args:
        conversation: Its tools are replaced by those of `use`.
        sampling: With the constraint of the answer's text.
        reasoning_budget: Most tokens of reasoning; None for no limit.
        separates_reasoning: Whether reasoning is separated from the text.
        budget_param: The call's field for the budget.

    Raises:
        RequestError: As `ChatTemplates.render`, and `Images`; unsupported: the model's format lacks
            calls or reasoning; invalid_constraint.
        ClientLeft: The client has left; other templates may be rendered first.
    """
    tokenizer = services.tokenizer
    async with connected(call.cancelled):
        form = await services.templates.form(conversation.template, call.tenant)
        reasons = form is not None and form.reads_reasoning
        if use.usable and (form is None or not form.reads_calls):
            raise _not_known("how this model writes calls", "tools")
        if separates_reasoning:
            conversation = _with_readable_reasoning(conversation, form)
        if reasoning_budget is not None and form is not None and not reasons:
            # None is within any budget.
            ignore(budget_param)
            reasoning_budget = None
        if reasoning_budget is not None and (form is None or form.reasoning is None):
            raise _not_known("how this model writes its reasoning", budget_param)
        if sampling.constraint is not None:
            # As admission does, before a grammar of megabytes is parsed.
            check_size(sampling.constraint, services.config.admission.max_constraint_bytes)
        tenant, sources = call.tenant, sources_in(conversation.turns)
        services.images.check(sources, await tokenizer.required())
        conversation = replace(conversation, tools=use.usable)
        rendered = await services.session_prompts.render(call, conversation)
        images = await services.images.load(sources, tenant)
        constraint = None
        if use.usable or sampling.constraint is not None or reasoning_budget is not None:
            special_tokens = (await tokenizer.required()).special_tokens
            asked_for = (use, sampling.constraint, reasoning_budget, special_tokens)
            constraint = await tokenizer.make_grammar(
                partial(
                    constraint_of,
                    form,
                    rendered.opening,
                    *asked_for,
                    reasoning_asked=reasoning_asked(conversation.reasoning, conversation.variables),
                )
            )
        if constraint is not None and sampling.constraint is None:
            _check_free_to_end(sampling)
        separates = separates_reasoning and reasons
        reading = None
        if use.usable or separates:
            reading = Reading(
                opening=rendered.opening, tools=use.usable, separates_reasoning=separates
            )
        constrained = replace(sampling, constraint=constraint)
        return Prepared(rendered.prompt, constrained, form, reading, images)


async def conversation_tokens(
    services: Services, conversation: Conversation, tenant: str
) -> tuple[int, ...]:
    """Return the tokens of a conversation as a prompt, with all of its images.

    Raises:
        RequestError: As `ChatTemplates.render`, `Images.load` and `Images.expand`; unsupported: as
            `prepare` for reasoning.
    """
    sources, tokenizer = sources_in(conversation.turns), await services.tokenizer.required()
    services.images.check(sources, tokenizer)
    form = await services.templates.form(conversation.template, tenant)
    conversation = _with_readable_reasoning(conversation, form)
    rendered = await services.templates.render(conversation, tenant)
    images = await services.images.load(sources, tenant)
    return await tokens_of(services, rendered.prompt, images, tenant)


async def tokens_of(
    services: Services, prompt: str | tuple[int, ...], images: Sequence[ImageInput], tenant: str
) -> tuple[int, ...]:
    """Return the tokens of a rendered prompt with its images.

    Raises:
        RequestError: As `Images.expand`.
    """
    if not isinstance(prompt, str):
        return prompt
    return await services.images.expand(services.tokenizer, prompt, images, tenant)


@contextmanager
def about_tools(reading: Reading | None) -> Iterator[None]:
    """Within it, an invalid constraint is attributed to the tools, if there are any.

    Without tools a constraint is the answer's format, for which each interface has its own name.
    """
    try:
        yield
    except NanoInferenceError as error:
        if error.code != "invalid_constraint" or reading is None or not reading.tools:
            raise
        found = _OF_ARGUMENTS.search(error.message)
        if found is None:
            raise FieldError(error.message, param="tools", code=error.code) from None
        tool = reading.tools[int(found["place"])]
        raise field_error(
            tool.where or "tools",
            f": the parameters of the tool {shown(tool.name)} can't be enforced: {found['why']}",
            remedy=IGNORING if IGNORING in error.message else "correct it, or leave the tool out",
            code=error.code,
        ) from None


def _with_readable_reasoning(
    conversation: Conversation, form: MessageFormat | None
) -> Conversation:
    """Return a conversation that turns reasoning on only if it can be separated from the text.

    Raises:
        FieldError: unsupported: the call requires it, and the model's format is unknown.
    """
    reasoning = conversation.reasoning
    if reasoning is None or not reasoning.on or (form is not None and form.reads_reasoning):
        return conversation
    if reasoning.required and form is None:
        raise _not_known("how this model writes its reasoning", reasoning.on_param)
    ignore(reasoning.on_param)
    return replace(conversation, reasoning=None)


def _not_known(what: str, param: str) -> FieldError:
    return field_error(
        param,
        f": {what} is not known; leave it out, or name its format by "
        "gateway.message_format, as docs/tools.md has it",
        code="unsupported",
    )


def _check_free_to_end(sampling: SamplingParams) -> None:
    """Refuse parameters that go on after the end of a grammar, which tools and budgets need."""
    for name in ("ignore_eos", "min_tokens"):
        if getattr(sampling, name):
            raise field_error(
                name,
                "goes on past the end of a message that has to be of some form "
                "(required or strict tools, parallel calls forbidden, a budget of reasoning); "
                "give one of them",
                code="invalid_constraint",
            )
