"""From a body of `/v1/responses` to our request."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable

import msgspec

from ....bus.public import GenerateRequest
from ....config import Config, shown
from ...chat_templates import Conversation, Turn
from ...fields import Body, check_model
from ...http import MAX_INT64, FieldError
from ..bodies import ResponseBody
from ..fields import read_fields
from ..requests import sampling_of
from .items import Item, items_of, turns_of

ID_PREFIX = "resp_"
"""What the id of each response begins with."""

LOGPROBS = "message.output_text.logprobs"
# There is no reasoning here to be shown, or not.
_HARMLESS = frozenset({"reasoning.encrypted_content"})

_MOST_METADATA = 16


class ResponseCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call, but for its prompt.

    Attributes:
        id: The response's own.
        created: When it came, seconds since the Unix epoch.
        fields: As they came, but for the input.
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
        return f"msg_{self.id.removeprefix(ID_PREFIX)}"

    def request(self, token_ids: tuple[int, ...], tenant: str, config: Config) -> GenerateRequest:
        """What is submitted for a prompt."""
        fields = self.fields
        most = fields.max_output_tokens
        # Admission cuts it to what the model's length leaves.
        most = config.engine.max_model_len if most is None else most
        return GenerateRequest(
            request_id=self.id,
            prompt_token_ids=token_ids,
            sampling=sampling_of(fields, most, fields.top_logprobs),
            stream=fields.stream,
            priority=min(-fields.priority, MAX_INT64),
            tenant=tenant,
            cache_salt=fields.cache_salt,
        )


def read_response(body: Body, config: Config) -> tuple[ResponseCall, list[Item]]:
    """A body of `/v1/responses`, and its input.

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
    if fields.background and not fields.store:
        raise FieldError(
            "background takes store: true; nobody could ask for it", param="background"
        )
    call = ResponseCall(
        id=f"{ID_PREFIX}{uuid.uuid4().hex}",
        created=int(time.time()),
        model=config.engine.model_name,
        fields=msgspec.structs.replace(fields, input=None),
        logprobs=logprobs,
    )
    return call, items_of(fields.input)


def conversation_of(fields: ResponseBody, items: Iterable[Item]) -> Conversation:
    """What the template is given. Instructions are those of this call alone."""
    turns: list[Turn] = []
    if fields.instructions:
        turns.append({"role": "system", "content": fields.instructions})
    return Conversation(turns=turns + turns_of(items), variables=fields.chat_template_kwargs)
