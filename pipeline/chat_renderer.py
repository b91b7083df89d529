"""Conversations with tools for who trains or evaluates in Python: as prompts, and from tokens back
to messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash
from jinja2 import TemplateError
from msgspec.structs import replace

from ..bus.public import FinishReason
from ..config import EngineConfig, RequestError, SamplingParams, shown
from ..stages.admission.checks import is_encodable
from ..text.detokenizer import Detokenizer, TokenPieces
from ..text.gguf import folder_of
from ..text.messages import (
    MessageReader,
    Reading,
    Tool,
    ToolCall,
    ToolUse,
    asked_to_reason,
    constraint_of,
    format_of,
    opening_of,
)
from ..text.tokenizer import load_tokenizer, special_token_ids, stop_token_ids_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Message = Mapping[str, Any]


class ChatPrompt(msgspec.Struct, frozen=True):
    """A conversation up to where the model goes on.

    Attributes:
        token_ids: `[prompt]`, what `InferenceEngine.generate` takes.
        opening: What of the model's message they have already, such as the mark that begins its
            reasoning.
        use: Which tools the model may, or has to, call.
        reasoning_asked: Whether the template's variables ask for reasoning; None if they don't
            say.
    """

    token_ids: tuple[int, ...]
    opening: str
    use: ToolUse
    reasoning_asked: bool | None = None


class ChatRenderer:
    """Writes conversations by a model's chat template, and reads what the model answers.

    ```python
    chat = ChatRenderer("tiny")
    prompt = chat.render([{"role": "user", "content": "What is 3 + 4?"}])
    (sample,) = engine.generate([prompt.token_ids], SamplingParams(temperature=0))
    message = chat.read(prompt, sample.completion_tokens, sample.finish_reason)
    ```

    A message that was read may stand in the next conversation as it is.
    """

    def __init__(self, model_path: str = "tiny", message_format: str = "auto") -> None:
        """Loads the tokenizer, and nothing else of the model.

        Args:
            model_path: As `EngineConfig.model_path`.
            message_format: How the model writes messages, as the setting `gateway.message_format`.

        Raises:
            ModelError: There is no tokenizer that can be used.
            ConfigError: There is no such format.
        """
        folder = folder_of(EngineConfig(model_path=model_path).model_folder)
        self._tokenizer: PreTrainedTokenizerFast = load_tokenizer(folder)
        self._format = format_of(self._tokenizer, folder, message_format)
        self._stop_token_ids = stop_token_ids_of(folder, self._tokenizer)
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
        """A conversation as a prompt.

        Args:
            messages: As OpenAI's: role and content, and what `read` gave.
            tools: As OpenAI's: `{"type": "function", "function": {name, description, parameters}}`.
            tool_choice: "none", "auto", "required", or the one that has to be called, as
                `{"type": "function", "function": {"name": …}}`.
            parallel_tool_calls: Whether there may be several calls in one message.
            variables: What else the template is given, such as `enable_thinking=True`.

        Raises:
            RequestError: The model has no chat template, or that refuses the conversation.
        """
        use = _use_of(tools, tool_choice, parallel_tool_calls)
        if not self._tokenizer.chat_template:
            raise RequestError("the model has no chat template", code="no_chat_template")
        if use.usable and self._format is None:
            raise RequestError(
                "nobody knows how this model writes calls of tools; name its message_format",
                code="unsupported",
            )
        try:
            text = self._tokenizer.apply_chat_template(
                [_as_templates_read(message) for message in messages],
                tools=[tool.as_templates_read() for tool in use.usable] or None,
                tokenize=False,
                add_generation_prompt=True,
                **variables,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {shown(str(error))}",
                code="invalid_messages",
            ) from error
        if not is_encodable(str(text)):
            raise RequestError(
                "a message holds a lone surrogate; give valid Unicode", code="invalid_messages"
            )
        token_ids = self._tokenizer.encode(str(text), add_special_tokens=False)
        opening = opening_of(self._format, str(text)) if self._format is not None else ""
        return ChatPrompt(tuple(token_ids), opening, use, asked_to_reason(variables))

    def sampling(
        self,
        prompt: ChatPrompt,
        params: SamplingParams | None = None,
        *,
        reasoning_budget: int | None = None,
    ) -> SamplingParams:
        """The same parameters, with a constraint that keeps the message to what was asked of it:
        a call where one is required, arguments of strict tools, and `params.constraint` of the
        text. A constrained message has no reasoning unless the template began it, its variables
        asked for it, or there is a budget.

        Args:
            params: The defaults when None.
            reasoning_budget: Most tokens of reasoning; None for no limit.

        Raises:
            RequestError: unsupported: how this model writes such a thing is not known.
        """
        params = params or SamplingParams()
        constraint = constraint_of(
            self._format,
            prompt.opening,
            prompt.use,
            params.constraint,
            reasoning_budget,
            special_token_ids(self._tokenizer),
            reasoning_asked=prompt.reasoning_asked,
        )
        return replace(params, constraint=constraint)

    def read(
        self,
        prompt: ChatPrompt,
        completion_tokens: Sequence[int],
        finish_reason: FinishReason = "stop",
    ) -> dict[str, Any]:
        """The message that a completion is.

        Args:
            completion_tokens: `[completion]`, with the stop token. The text of a stop string is
                a part of the message here.

        Returns:
            As OpenAI's: role, content, and where there are any `reasoning_content` and
            `tool_calls`. A call that is malformed or cut off is content, as it was written.
        """
        told = tuple(completion_tokens)
        if finish_reason == "stop" and told and told[-1] in self._stop_token_ids:
            told = told[:-1]
        detokenizer = Detokenizer(self._pieces)
        texts = [detokenizer.push((token_id,)) for token_id in told]
        texts.append(detokenizer.finish())
        if self._format is None:
            return {"role": "assistant", "content": "".join(texts)}
        reading = Reading(opening=prompt.opening, tools=prompt.use.usable)
        seed = xxhash.xxh3_64_hexdigest(repr((prompt.token_ids, told)).encode())
        reader = MessageReader(self._format, reading, seed)
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


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _as_templates_read(message: Message) -> dict[str, Any]:
    """Templates want a text in one piece, the arguments of calls as objects, and nothing that says
    nothing."""
    turn = {name: value for name, value in message.items() if value is not None}
    if turn.get("role") == "assistant":
        turn.setdefault("content", "")
    if not isinstance(turn.get("content", ""), str):
        turn["content"] = _joined(turn["content"])
    if calls := turn.get("tool_calls"):
        turn["tool_calls"] = [
            {**call, "function": call["function"] | {"arguments": _decoded(call)}} for call in calls
        ]
    return turn


def _joined(parts: Iterable[Message]) -> str:
    """Raises ValueError: there is more than text."""
    texts = [part.get("text") for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a content is a text, or parts of text")
    return "\n".join(map(str, texts))


def _decoded(call: Message) -> Any:
    arguments = call["function"].get("arguments", {})
    return msgspec.json.decode(arguments) if isinstance(arguments, str) else arguments


def _use_of(tools: Iterable[Message], choice: str | Message, parallel: bool) -> ToolUse:
    """Raises RequestError: invalid_request: a tool is none, or the choice names none."""
    try:
        known = tuple(map(_tool, tools))
        named = "" if isinstance(choice, str) else str(choice["function"]["name"])
        kind = choice if isinstance(choice, str) else "required"
        use = msgspec.convert(
            {"tools": [], "choice": kind, "named": named, "parallel": parallel}, ToolUse
        )
    except (msgspec.ValidationError, LookupError, TypeError, AttributeError) as error:
        raise RequestError(f"tools and tool_choice are not as OpenAI's: {error}") from None
    names = [tool.name for tool in known]
    if len(set(names)) < len(names):
        raise RequestError(f"the tools are {shown(names)}; each needs a name of its own")
    if named and named not in names:
        raise RequestError(f"tool_choice asks for {shown(named)}, and the tools are {shown(names)}")
    return replace(use, tools=known)


def _tool(given: Message) -> Tool:
    """OpenAI's library writes what was not told as None."""
    function = {name: value for name, value in given["function"].items() if value is not None}
    return msgspec.convert(function, Tool)
