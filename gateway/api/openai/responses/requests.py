"""From a body of `/v1/responses` to our request, and its durable record."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from .....bus.public import ErrorInfo, GenerateRequest, ImageInput
from .....config import Config, Constraint, NanoInferenceError, SamplingParams, field_name, shown
from .....text.messages import Reading
from ....caller import ANYBODY, Caller
from ....server.http import EngineError, field_error
from ....serving.chat_templates import Conversation, Turn, reasoning_of_effort
from ....serving.constraints import of_structured_outputs, of_text_format, the_one
from ....serving.durable_calls import CallHead, DurableRecord
from ....serving.fields import Body, engine_priority, ignore, read_part
from ....serving.model_names import adapter_of
from ....serving.request_ids import new_id
from ....serving.sampling_fields import RESPONSE_SAMPLING, read_sampling
from ..response_bodies import ResponseBody
from .items import Item, items_of, turns_of

ID_PREFIX = "resp_"
"""The beginning of each response's id."""

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
# There are no built-in tools whose results could be included.
_NEUTRAL = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)

_MOST_METADATA, _LONGEST_KEY, _LONGEST_TEXT = 16, 64, 512
_MOST_LISTED = 100


class RetrieveQuery(msgspec.Struct, frozen=True):
    """The query of a response: as a whole, or as a stream after an event."""

    NEUTRAL: ClassVar = {
        "include": "a response has what its call included",
        "include[]": "a response has what its call included",
        "include_obfuscation": "nothing is padded",
    }

    stream: bool = False
    starting_after: Annotated[int, msgspec.Meta(ge=0)] | None = None


class ItemsQuery(msgspec.Struct, frozen=True):
    """The query of a response's input items."""

    NEUTRAL: ClassVar = RetrieveQuery.NEUTRAL

    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=_MOST_LISTED)] = 20


class ResponseCall(CallHead, frozen=True, kw_only=True):
    """A call, without its prompt.

    Attributes:
        fields: As they came, without the input.
        sampling: Without the constraint that tools or reasoning may add.
        logprobs: Whether they are shown.
    """

    fields: ResponseBody
    sampling: SamplingParams
    logprobs: bool


class NeverBegun(EngineError):
    """A stored response of which no request was submitted, and none will be."""


class ResponseRecord(DurableRecord, frozen=True, kw_only=True, tag="response"):
    """A response, as the bus keeps it.

    Attributes:
        items: The conversation before its output, without instructions.
        num_before: How many of the items are of an earlier response, or of its conversation.
        prompt: The tokens that are submitted, with images the text; none where no gateway has to
            submit them again.
        deadline_ns: On the clock of `now_ns`; None without a limit.
        caller: The caller, with its permissions.
        failure: Why no request was submitted.
        reading: For the reader of its output; None where all of that is text.
        constraint: The output's, where tools or reasoning add to that of the fields.
        images: Images of the prompt.
        session: The session of which it is a turn; "" for none.
        answer: The response as it is now, of several requests; None if it follows from the outputs
            of one.
    """

    call: ResponseCall
    items: list[Item]
    num_before: int = 0
    prompt: str | tuple[int, ...] = ()
    deadline_ns: int | None = None
    caller: Caller = ANYBODY
    failure: ErrorInfo | None = None
    reading: Reading | None = None
    constraint: Constraint | None = None
    images: tuple[ImageInput, ...] = ()
    session: str = ""
    answer: dict[str, Any] | None = None

    @property
    def request_ids(self) -> list[str]:
        return [self.id]

    @property
    def background(self) -> bool:
        return self.call.fields.background

    @property
    def is_complete(self) -> bool:
        return self.background or self.keyed is not None or self.answer is not None

    @property
    def is_durable(self) -> bool:
        return self.call.fields.store or self.keyed is not None

    @property
    def sampling(self) -> SamplingParams:
        if self.constraint is None:
            return self.call.sampling
        return msgspec.structs.replace(self.call.sampling, constraint=self.constraint)

    def request(self, config: Config) -> GenerateRequest:
        """Return the request to submit."""
        fields = self.call.fields
        return GenerateRequest(
            request_id=self.id,
            prompt=self.prompt if isinstance(self.prompt, str) else None,
            prompt_token_ids=None if isinstance(self.prompt, str) else self.prompt,
            sampling=self.sampling,
            stream=fields.stream,
            priority=engine_priority(fields.priority),
            tenant=self.tenant,
            cache_salt=fields.cache_salt,
            model=adapter_of(fields.model, config),
            kv_session=fields.kv_session,
            images=self.images,
            add_special_tokens=not self.images,
            is_chat=True,
        )

    def failed(self, error: NanoInferenceError) -> ResponseRecord:
        """Return the record of the same response, which will never be begun."""
        failure = ErrorInfo(code=error.code, message=error.message)
        return self._unprompted(failure)

    def encode(self) -> bytes:
        if self.is_complete:
            return super().encode()
        return msgspec.json.encode(self._unprompted(self.failure))

    def _unprompted(self, failure: ErrorInfo | None) -> ResponseRecord:
        """Return the record without what only a submission needs."""
        return msgspec.structs.replace(self, prompt=(), images=(), constraint=None, failure=failure)


def read_response(
    body: Body, config: Config, max_model_len: int, tenant: str
) -> tuple[ResponseCall, list[Item]]:
    """Read a body of `/v1/responses`: the call, and its input.

    Args:
        max_model_len: Tokens that prompt and completion may have together.

    Raises:
        RequestError: A field can't be obeyed.
    """
    fields = read_part(body, ResponseBody)
    for place, each in enumerate(fields.include):
        param = f"include[{place}]"
        if each in _NEUTRAL:
            ignore(param)
        elif each not in (LOGPROBS, ENCRYPTED):
            raise field_error(
                param,
                f": {shown(each)} is not there to be included; {LOGPROBS} and {ENCRYPTED} are",
                code="unsupported",
                remedy="leave it out",
            )
    logprobs = LOGPROBS in fields.include
    if fields.top_logprobs and not logprobs:
        raise field_error("top_logprobs", f"takes {LOGPROBS} in include")
    check_metadata(fields.metadata)
    if fields.conversation_id and fields.previous_response_id:
        raise field_error(
            "previous_response_id", "and conversation both say what comes before; give one of them"
        )
    if fields.background and not fields.store:
        raise field_error("background", "takes store: true, or no client could find it")
    call = ResponseCall(
        id=new_id(ID_PREFIX),
        created=int(time.time()),
        model=adapter_of(fields.model, config) or config.engine.model_name,
        of_model=config.engine.model_name,
        fields=msgspec.structs.replace(fields, input=None),
        sampling=read_sampling(
            body,
            RESPONSE_SAMPLING,
            # Admission lowers it to what the model's length leaves.
            max_tokens=max_model_len
            if fields.max_output_tokens is None
            else fields.max_output_tokens,
            logprobs=fields.top_logprobs or 0,
            constraint=_constraint(fields),
        ),
        logprobs=logprobs,
    )
    return call, items_of(fields.input, tenant)


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raises FieldError: There are more texts, or longer ones, than OpenAI has."""
    if len(metadata) > _MOST_METADATA:
        raise field_error("metadata", f"has more than {_MOST_METADATA} texts; leave some out")
    for key, text in metadata.items():
        if len(key) > _LONGEST_KEY:
            why = f"has a key of {len(key)} characters, {shown(key)}"
            raise field_error("metadata", why, f"a key may have {_LONGEST_KEY}")
        if len(text) > _LONGEST_TEXT:
            why = f"is a text of {len(text)} characters"
            raise field_error(f"metadata.{field_name(key)}", why, f"it may have {_LONGEST_TEXT}")


def _constraint(fields: ResponseBody) -> Constraint | None:
    """Raises FieldError: several fields constrain the text, or one is not supported."""
    given = fields.text.format
    return the_one(
        {
            "structured_outputs": of_structured_outputs(
                fields.structured_outputs, "structured_outputs"
            ),
            "text.format": None if given is None else of_text_format(given, "text.format"),
        }
    )


def conversation_of(fields: ResponseBody, items: Iterable[Item]) -> Conversation:
    """Return the conversation for the chat template. Instructions are those of this call alone."""
    turns: list[Turn] = []
    if fields.instructions:
        turns.append({"role": "system", "content": fields.instructions})
    effort = fields.reasoning.effort if fields.reasoning else None
    turns += turns_of(items)
    return Conversation(
        # A chat template needs a message.
        turns=turns or [{"role": "user", "content": ""}],
        variables=fields.chat_template_kwargs,
        reasoning=reasoning_of_effort(effort, "reasoning.effort"),
    )
