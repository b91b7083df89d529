"""From a body of `/v1/responses` to our request."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from typing import Any

import msgspec

from .....bus.public import GenerateRequest
from .....config import Config, Constraint, SamplingParams, field_name, shown
from ....server.http import FieldError, convert
from ....serving.chat_templates import Conversation, Turn, reasoning_of_effort
from ....serving.constraints import of_structured_outputs, of_text_format, the_one
from ....serving.fields import Body, adapter_of, engine_priority, read_part
from ....serving.sampling_fields import TEXT_SAMPLING, read_sampling
from ..bodies import ResponseBody
from .items import Item, items_of
from .turns import turns_of

ID_PREFIX = "resp_"
"""What the id of each response begins with."""

LOGPROBS = "message.output_text.logprobs"
# Reasoning is told, and nothing of it is kept from whoever asks for it.
_HARMLESS = frozenset({"reasoning.encrypted_content"})

_MOST_METADATA = 16

_AS_IT_COMES = {"verbosity": ("medium",)}
"""What asks of the text of a response for nothing but what is done anyway."""


class ResponseCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call, but for its prompt.

    Attributes:
        id: The response's own.
        created: When it came, seconds since the Unix epoch.
        fields: As they came, but for the input.
        logprobs: Whether they are shown.
        sampling: Without the constraint that tools or reasoning may add.
        of_model: The id of the model that it is for; `model` may be an adapter's.
    """

    id: str
    created: int
    model: str
    fields: ResponseBody
    sampling: SamplingParams
    logprobs: bool
    of_model: str = ""

    @property
    def item_id(self) -> str:
        """Of the one message of the response, the same in all events."""
        return f"msg_{self.id.removeprefix(ID_PREFIX)}"

    def request(self, token_ids: tuple[int, ...], tenant: str, config: Config) -> GenerateRequest:
        """What is submitted for a prompt."""
        return GenerateRequest(
            request_id=self.id,
            prompt_token_ids=token_ids,
            sampling=self.sampling,
            stream=self.fields.stream,
            priority=engine_priority(self.fields.priority),
            tenant=tenant,
            cache_salt=self.fields.cache_salt,
            model=adapter_of(self.fields.model, config),
        )


def read_response(
    body: Body, config: Config, max_model_len: int
) -> tuple[ResponseCall, list[Item]]:
    """A body of `/v1/responses`, and its input.

    Args:
        max_model_len: Tokens that prompt and completion may have together.

    Raises:
        RequestError: A field can't be obeyed.
    """
    fields = read_part(body, ResponseBody)
    for place, each in enumerate(fields.include):
        if each != LOGPROBS and each not in _HARMLESS:
            param = f"include[{place}]"
            raise FieldError(
                f"{param}: {shown(each)} is not there to be included; {LOGPROBS} is",
                param=param,
                code="unsupported",
            )
    logprobs = LOGPROBS in fields.include
    if fields.top_logprobs and not logprobs:
        raise FieldError(f"top_logprobs takes {LOGPROBS} in include", param="top_logprobs")
    if len(fields.metadata) > _MOST_METADATA:
        raise FieldError(f"metadata has more than {_MOST_METADATA} texts", param="metadata")
    if fields.background and not fields.store:
        raise FieldError(
            "background takes store: true; nobody could ask for it", param="background"
        )
    call = ResponseCall(
        id=f"{ID_PREFIX}{uuid.uuid4().hex}",
        created=int(time.time()),
        model=adapter_of(fields.model, config) or config.engine.model_name,
        of_model=config.engine.model_name,
        fields=msgspec.structs.replace(fields, input=None),
        sampling=read_sampling(
            body,
            TEXT_SAMPLING,
            # Admission lowers it to what the model's length leaves.
            max_tokens=max_model_len
            if fields.max_output_tokens is None
            else fields.max_output_tokens,
            logprobs=fields.top_logprobs or 0,
            constraint=_constraint(fields),
        ),
        logprobs=logprobs,
    )
    return call, items_of(fields.input)


def _constraint(fields: ResponseBody) -> Constraint | None:
    """What the text has to be.

    Raises:
        FieldError: Several fields say so, or one says what is not there.
    """
    return the_one(
        {
            "structured_outputs": of_structured_outputs(
                fields.structured_outputs, "structured_outputs"
            ),
            "text.format": _text_format(fields.text),
        }
    )


def _text_format(text: Body) -> Constraint | None:
    """Raises FieldError: it says more of the text than its format."""
    for name, value in text.items():
        if name != "format" and value not in (None, *_AS_IT_COMES.get(name, ())):
            where = f"text.{field_name(name)}"
            raise FieldError(
                f"{where} is not supported here; leave it out, or give null",
                param=where,
                code="unsupported",
            )
    given = text.get("format")
    if given is None:
        return None
    return of_text_format(convert(given, dict[str, Any], "text.format"), "text.format")


def conversation_of(fields: ResponseBody, items: Iterable[Item]) -> Conversation:
    """What the template is given. Instructions are those of this call alone, and so are tools."""
    turns: list[Turn] = []
    if fields.instructions:
        turns.append({"role": "system", "content": fields.instructions})
    effort = fields.reasoning.effort if fields.reasoning else None
    return Conversation(
        turns=turns + turns_of(items),
        variables=fields.chat_template_kwargs,
        reasoning=reasoning_of_effort(effort, "reasoning.effort"),
    )
