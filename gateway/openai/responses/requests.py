"""From a body of `/v1/responses` to our request."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec

from ....bus.public import GenerateRequest
from ....config import Config, shown
from ...chat_templates import Conversation, Turn
from ...fields import Body, check_model
from ...http import MAX_INT64, FieldError
from ..bodies import ResponseBody
from ..fields import read_fields
from ..messages import turn_of
from ..requests import sampling_of

LOGPROBS = "message.output_text.logprobs"
# There is no reasoning here to be shown, or not.
_HARMLESS = frozenset({"reasoning.encrypted_content"})

_MOST_METADATA = 16
# Of a message that was an answer; they say nothing to a template.
_LEFT_OUT = frozenset({"id", "status", "phase", "type"})


class ResponseCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call, but for its prompt.

    Attributes:
        id: The response's own.
        created: When it came, seconds since the Unix epoch.
        fields: As they came.
        logprobs: Whether they are shown.
    """

    id: str
    created: int
    model: str
    fields: ResponseBody
    logprobs: bool

    @property
    def item_id(self) -> str:
        """Of the one message of the response, the same in all events."""
        return f"msg_{self.id.removeprefix('resp_')}"

    def request(
        self, token_ids: tuple[int, ...], tenant: str, max_model_len: int
    ) -> GenerateRequest:
        """What is submitted for a prompt.

        Args:
            max_model_len: Tokens that prompt and completion may have together.
        """
        fields = self.fields
        most = fields.max_output_tokens
        # Admission cuts it to what the model's length leaves.
        most = max_model_len if most is None else most
        return GenerateRequest(
            request_id=self.id,
            prompt_token_ids=token_ids,
            sampling=sampling_of(fields, most, fields.top_logprobs),
            stream=fields.stream,
            priority=min(-fields.priority, MAX_INT64),
            tenant=tenant,
            cache_salt=fields.cache_salt,
        )


def read_response(body: Body, config: Config) -> ResponseCall:
    """A body of `/v1/responses`.

    Raises:
        RequestError: A field can't be obeyed.
    """
    fields = read_fields(body, ResponseBody, "responses")
    check_model(fields.model, config)
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
    return ResponseCall(
        id=f"resp_{uuid.uuid4().hex}",
        created=int(time.time()),
        model=config.engine.model_name,
        fields=fields,
        logprobs=logprobs,
    )


def conversation_of(fields: ResponseBody) -> Conversation:
    """What the template is given.

    Raises:
        FieldError: An item is no message, or holds what is not text.
    """
    if not fields.input:
        raise FieldError("input is empty; give a text or messages", param="input")
    turns: list[Turn] = []
    if fields.instructions:
        turns.append({"role": "system", "content": fields.instructions})
    if isinstance(fields.input, str):
        turns.append({"role": "user", "content": fields.input})
    else:
        turns += [_turn(item, f"input[{place}]") for place, item in enumerate(fields.input)]
    return Conversation(turns=turns, variables=fields.chat_template_kwargs)


def _turn(item: dict[str, Any], where: str) -> Turn:
    kind = item.get("type") or "message"
    if kind != "message":
        raise FieldError(
            f"{where}: an item of type {shown(kind)} is not supported here; send messages",
            param=where,
            code="unsupported",
        )
    message = {name: value for name, value in item.items() if name not in _LEFT_OUT}
    return turn_of(message, where)
