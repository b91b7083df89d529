"""Conversations with tools in Python: as prompts, and from tokens back to messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash
from msgspec.structs import replace

from ..bus.public import FinishReason
from ..config import EngineConfig, ModelError, RequestError, SamplingParams, field_error, shown
from ..text import messages as chat
from ..text.conversation import Turn, arguments_of, check_results, render_conversation
from ..text.detokenizer import Detokenizer, TokenPieces
from ..text.images import ImageProcessor
from ..text.model_folder import folder_of
from ..text.model_format import format_of
from ..text.tokenizer import encode, load_tokenizer, special_token_ids, stop_token_ids_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Message = Mapping[str, Any]


class ChatPrompt(msgspec.Struct, frozen=True):
    """A conversation before the model's message, for `InferenceEngine.generate`.

    Attributes:
        token_ids: `[prompt]`.
        opening: The begin of the model's message in the prompt, such as the mark before reasoning.
        use: The tools that the model may, or must, call.
        reasoning_asked: Whether the template's variables turn reasoning on; None if unset.
    """

    token_ids: tuple[int, ...]
    opening: str
    use: chat.ToolUse
    reasoning_asked: bool | None = None


class ChatRenderer:
    """Renders conversations by a model's chat template, and parses the model's messages.

    ```python
    chat = ChatRenderer("tiny")
    prompt = chat.render([{"role": "user", "content": "What is 3 + 4?"}])
    (sample,) = engine.generate([prompt], SamplingParams(temperature=0))
    sample.message
    ```

    A parsed message can be part of the next conversation as it is.
    """

    def __init__(self, model_path: str = "tiny", message_format: str = "auto") -> None:
        """Load the model's tokenizer alone.

        Args:
            model_path: As `EngineConfig.model_path`.
            message_format: As the setting `gateway.message_format`.

        Raises:
            ModelError: There is no usable tokenizer.
            ConfigError: The format is unknown.
        """
        folder = folder_of(EngineConfig(model_path=model_path).model_folder)
        self._tokenizer: PreTrainedTokenizerFast = load_tokenizer(folder)
        self._format = format_of(self._tokenizer, folder, message_format)
        self._stop_token_ids = stop_token_ids_of(folder, self._tokenizer)
        self._images: ImageProcessor | None = None
        # Without a usable one the model serves texts.
        with suppress(ModelError):
            self._images = ImageProcessor.of(folder, self._tokenizer)
        self._pieces = TokenPieces(self._tokenizer.backend_tokenizer, skip_special=False)

    def render(
        self,
        messages: Iterable[Message],
        *,
        tools: Iterable[Message] = (),
        tool_choice: str | Message = "auto",
        parallel_tool_calls: bool = True,
        **variables: Any,
    ) -> ChatPrompt:
        """Render a conversation as a prompt.

        Args:
            messages: In OpenAI's form: role and content; results of `read`, too. A part
                `{"type": "image"}` of a content is the place of an image, which `generate` gets.
            tools: In OpenAI's form: `{"type": "function", "function": {name, description,
                parameters}}`.
            tool_choice: "none", "auto", "required", or the tool to call, as
                `{"type": "function", "function": {"name": …}}`.
            parallel_tool_calls: Whether a message may have several calls.
            variables: More variables of the template, such as `enable_thinking=True`.

        Raises:
            RequestError: invalid_messages: a message is not in OpenAI's form, or a tool's result is
                that of no call; unsupported: the template does not read the tools or a variable;
                others as the gateway's, by the template.
        """
        use = _use_of(tools, tool_choice, parallel_tool_calls)
        if use.usable and (self._format is None or not self._format.reads_calls):
            raise RequestError(
                "the format of this model's tool calls is unknown; set message_format",
                code="unsupported",
            )
        turns = _turns(messages)
        check_results(turns)
        text, opening = render_conversation(
            self._tokenizer,
            turns,
            placeholder=self._images.placeholder if self._images is not None else None,
            form=self._format,
            tools=use.usable,
            variables=variables,
        )
        token_ids = encode(text, self._tokenizer, add_special_tokens=False, code="invalid_messages")
        return ChatPrompt(token_ids, opening, use, chat.asked_to_reason(variables))

    def sampling(
        self,
        prompt: ChatPrompt,
        params: SamplingParams | None = None,
        *,
        reasoning_budget: int | None = None,
    ) -> SamplingParams:
        """Return the parameters with a constraint for the message: a required call, arguments of
        strict tools, and `params.constraint` for the text.

        A constrained message has no reasoning unless the template began it, its variables turned
        it on, or there is a budget.

        Args:
            params: The defaults when None.
            reasoning_budget: Most tokens of reasoning; None for no limit.

        Raises:
            RequestError: unsupported: this model's format is unknown.
        """
        params = params or SamplingParams()
        constraint = chat.constraint_of(
            self._format,
            prompt.opening,
            prompt.use,
            params.constraint,
            reasoning_budget,
            special_token_ids(self._tokenizer),
            reasoning_asked=prompt.reasoning_asked,
        )
        return replace(params, constraint=constraint)

    def prompt_of(self, token_ids: Sequence[int]) -> ChatPrompt:
        """Return the conversation without tools that a prompt's tokens are."""
        text = self._tokenizer.decode(list(token_ids))
        opening = "" if self._format is None else chat.opening_of(self._format, text)
        return ChatPrompt(tuple(token_ids), opening, chat.ToolUse())

    def read(
        self,
        prompt: ChatPrompt,
        completion_tokens: Sequence[int],
        finish_reason: FinishReason = "stop",
    ) -> dict[str, Any]:
        """Parse a completion into a message.

        Args:
            completion_tokens: `[completion]`, stop token included. The text of a stop string is
                part of the message.

        Returns:
            In OpenAI's form: role, content, and `reasoning_content` and `tool_calls` if there are
            any. A malformed or truncated call is content, as the model wrote it.
        """
        token_ids = tuple(completion_tokens)
        if finish_reason == "stop" and token_ids and token_ids[-1] in self._stop_token_ids:
            token_ids = token_ids[:-1]
        detokenizer = Detokenizer(self._pieces)
        texts = [detokenizer.push((token_id,)) for token_id in token_ids]
        texts.append(detokenizer.finish())
        if self._format is None:
            return {"role": "assistant", "content": "".join(texts)}
        reading = chat.Reading(opening=prompt.opening, tools=prompt.use.usable)
        seed = xxhash.xxh3_64_hexdigest(repr((prompt.token_ids, token_ids)).encode())
        reader = chat.MessageReader(self._format, reading, seed)
        deltas = [*map(reader.feed, texts), reader.finish()]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(delta.content for delta in deltas),
        }
        if reasoning := "".join(delta.reasoning for delta in deltas):
            message["reasoning_content"] = reasoning
        if calls := [_call(call) for delta in deltas for call in delta.calls]:
            message["tool_calls"] = calls
        return message


@lru_cache(maxsize=4)
def renderer_of(model_path: str) -> ChatRenderer:
    """Return a model's renderer, loaded once."""
    return ChatRenderer(model_path)


def _call(call: chat.ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _turns(messages: Iterable[Message]) -> list[Turn]:
    """Raises FieldError: invalid_messages."""
    if isinstance(messages, str | Mapping):
        raise field_error(
            "messages",
            f'is {shown(messages)} and no list; pass [{{"role": "user", "content": …}}]',
            code="invalid_messages",
        )
    try:
        given = list(messages)
    except TypeError as error:
        raise field_error("messages", "must be a list", code="invalid_messages") from error
    return [_turn(message, f"messages[{position}]") for position, message in enumerate(given)]


def _turn(message: Message, where: str) -> Turn:
    """Return a message in the form of templates. Fields that are unknown here reach the template.

    Raises:
        FieldError: invalid_messages.
    """
    try:
        turn = {name: value for name, value in message.items() if value is not None}
        refusal, reasoning = turn.pop("refusal", None), turn.pop("reasoning", None)
        if turn["role"] == "assistant":
            turn.setdefault("content", refusal or "")
        turn["content"] = _content(turn["content"])
        if reasoning:
            turn.setdefault("reasoning_content", reasoning)
        if calls := turn.pop("tool_calls", None):
            turn["tool_calls"] = [_called(call) for call in calls]
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise field_error(
            where,
            f"is not in OpenAI's form: {shown(str(error))}",
            code="invalid_messages",
            remedy="write it with a role and content",
        ) from error
    return turn


def _content(content: str | Iterable[Message]) -> str | list[dict[str, Any]]:
    """Return a content in the form of templates.

    Raises:
        ValueError: A part is neither text nor the place of an image.
    """
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = [
        {"type": "image"}
        if part.get("type") == "image"
        else {"type": "text", "text": part.get("text", part.get("refusal"))}
        for part in content
    ]
    if not all(isinstance(part.get("text", ""), str) for part in parts):
        raise ValueError("a content is a text, or parts of text, and of the type image")
    return parts


def _called(call: Message) -> dict[str, Any]:
    function = call["function"]
    name, arguments = function["name"], arguments_of(function.get("arguments"))
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _use_of(tools: Iterable[Message], choice: str | Message, parallel: bool) -> chat.ToolUse:
    """Raises RequestError: invalid_request: a tool or the choice is invalid."""
    try:
        given = [(f"tools[{i}].function", _tool(tool)) for i, tool in enumerate(tools)]
        named = "" if isinstance(choice, str) else str(choice["function"]["name"])
        kind = choice if isinstance(choice, str) else "required"
        use = msgspec.convert(
            {"tools": [], "choice": kind, "named": named, "parallel": parallel}, chat.ToolUse
        )
    except (msgspec.ValidationError, LookupError, TypeError, AttributeError) as error:
        raise RequestError(
            f"tools and tool_choice are not in OpenAI's form: {error}",
            remedy="give a list of functions, each with a name",
        ) from None
    known = chat.tools_of(given)
    names = [tool.name for tool in known]
    if named and named not in names:
        raise RequestError(
            f"tool_choice names {shown(named)}, and the tools are {shown(names)}",
            remedy="name one of them",
        )
    return replace(use, tools=known)


def _tool(given: Message) -> chat.Tool:
    """OpenAI's library writes missing fields as None."""
    function = {name: value for name, value in given["function"].items() if value is not None}
    found = msgspec.convert(function, chat.Tool)
    return chat.tool_of(found.name, found.description, found.parameters, found.strict)
