"""Items of a conversation: read, listed, and turned into what chat templates read."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

import msgspec

from .....config import shown
from ....server.http import field_error
from ....serving.chat_templates import Turn
from ....serving.fields import ignore, read_part
from ....serving.sealed import unseal
from ....serving.tools import DirectCaller, result_text, tool_call
from ..bodies import OpenAIMessage
from ..custom_tools import INPUT
from ..messages import THOUGHTS, arguments_of, content_of, turn_of
from .tools import flat_name

Item = dict[str, Any]
"""An id and a type, with the fields of a message (its content is a list of parts), of a call of a
function or custom tool, of its output, of the reasoning of a turn, or of a compaction."""

REFERENCE = "item_reference"
REASONING, COMPACTION = "reasoning", "compaction"
"""Types of items, and the kinds of their sealed texts."""

MCP_CALL, MCP_LIST = "mcp_call", "mcp_list_tools"
MCP_REQUEST, MCP_RESPONSE = "mcp_approval_request", "mcp_approval_response"

SUMMARY = "Summary of the conversation so far:\n"
"""The beginning of a compaction's text."""

_LONGEST_ID = 128
_LEFT_OUT = frozenset({"id", "status", "phase", "type"})
"""Fields of an item that chat templates ignore."""


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call by the model."""

    OPEN: ClassVar = True

    call_id: str
    name: str
    arguments: str = "{}"
    namespace: str | None = None
    caller: DirectCaller | None = None


class CustomCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a custom tool by the model."""

    call_id: str
    name: str
    input: str
    namespace: str | None = None
    caller: DirectCaller | None = None


class FunctionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a call: a text, or parts of text and images."""

    OPEN: ClassVar = True

    call_id: str
    output: str | list[dict[str, Any]]
    name: str | None = None
    caller: DirectCaller | None = None


class ReasoningPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of reasoning."""

    OPEN: ClassVar = True

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True):
    """The model's reasoning before a text or a call. Encrypted content can't be read."""

    OPEN: ClassVar = True

    summary: list[ReasoningPart] = []
    content: list[ReasoningPart] | None = None
    encrypted_content: str | None = None


class CompactionItem(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation in the place of which a summary stands."""

    OPEN: ClassVar = True

    encrypted_content: str


class McpCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of an MCP server's tool, with its result."""

    OPEN: ClassVar = True

    server_label: str
    name: str
    arguments: str = "{}"
    output: str | None = None
    error: dict[str, Any] | str | None = None
    approval_request_id: str | None = None


class McpListTools(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of an MCP server, as a response listed them."""

    OPEN: ClassVar = True

    server_label: str
    tools: list[dict[str, Any]] = []


class McpApprovalRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A call of an MCP server's tool that waits for an approval."""

    OPEN: ClassVar = True

    server_label: str
    name: str
    arguments: str = "{}"


class McpApprovalResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The approval or refusal of a call."""

    OPEN: ClassVar = True

    approval_request_id: str
    approve: bool
    reason: str | None = None


class ItemReference(msgspec.Struct, frozen=True, kw_only=True):
    """An item that is stored, by its id."""


def items_of(
    given: str | list[dict[str, Any]] | None, tenant: str = "", param: str = "input"
) -> list[Item]:
    """Read the items of a body's `input`, or another field, without those of built-in tools.

    References to items are still to be resolved.

    Args:
        tenant: The one for whom sealed texts were made.

    Raises:
        FieldError: An item is of an unknown type, or holds no text.
    """
    if not given:
        return []
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    read = (_item(item, f"{param}[{place}]", tenant) for place, item in enumerate(items))
    return [item for item in read if item is not None]


def answered(output: Iterable[dict[str, Any]]) -> list[Item]:
    """Read the items of a response's `output`, to continue the conversation."""
    return [item for each in output if (item := _item(each, "output", "")) is not None]


def check_calls(items: Iterable[Item], first: int, given: str = "input") -> None:
    """Check that each output of a call stands after that call.

    Args:
        first: The number of items that were there before.
        given: The field with the others.

    Raises:
        FieldError: There is no such call.
    """
    calls: set[str] = set()
    for place, item in enumerate(items):
        if item["type"] in _CALLS:
            calls.add(item["call_id"])
        elif item["type"] in _OUTPUTS and item["call_id"] not in calls:
            param = f"{given}[{place - first}].call_id"
            raise field_error(
                param,
                f": there is no call {shown(item['call_id'])} before it; send that "
                "as well, or previous_response_id",
            )


def page_of(
    items: list[Item], order: Literal["asc", "desc"], after: str | None, limit: int
) -> dict[str, Any]:
    """Return a page of items, in the form of OpenAI's lists.

    Raises:
        FieldError: There is no item `after`.
    """
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        places = [place for place, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise field_error(
                "after",
                f": there is no item {shown(after)} here",
                remedy="give the id of one that there is",
            )
        ordered = ordered[places[0] + 1 :]
    page = ordered[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ordered) > limit,
    }


def message_of(item: Item) -> dict[str, Any]:
    """Return the fields of an item that have an effect; those of a message are a chat's."""
    return {name: value for name, value in item.items() if name not in _LEFT_OUT}


# --- one item ---------------------------------------------------------------------------------


def _item(given: dict[str, Any], where: str, tenant: str) -> Item | None:
    """Read an item, without fields that have no effect; None for one that has none itself."""
    kind = given.get("type") or (REFERENCE if given.keys() == {"id"} else "message")
    if kind in _BUILT_IN:
        ignore(where)
        return None
    known = _KINDS.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise field_error(
            where,
            f": an item of type {shown(kind)} is not supported here; {', '.join(_KINDS)} are",
            code="unsupported",
        )
    prefix, read = known
    fields = read(message_of(given), where, tenant)
    name = given.get("id")
    named = isinstance(name, str) and 0 < len(name) <= _LONGEST_ID
    item_id = name if named else f"{prefix}{uuid.uuid4().hex}"
    return {"id": item_id, "type": kind, "status": "completed"} | fields


def _message(given: dict[str, Any], where: str, tenant: str) -> Item:
    turn = turn_of(given, where)
    fields = {
        each: given[each] for each in OpenAIMessage.__struct_fields__ if given.get(each) is not None
    }
    if reasoning := turn.get("reasoning_content"):
        fields["reasoning_content"] = reasoning
    content = fields.get("content") or []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    parts = [part for part in parts if part["type"] not in THOUGHTS]
    return fields | {"content": [_part(part, fields["role"]) for part in parts]}


def _part(part: dict[str, Any], role: str) -> dict[str, Any]:
    if part["type"] == "refusal":
        return {"type": "refusal", "refusal": part["refusal"]}
    if part["type"] in ("image_url", "input_image"):
        image_url = part["image_url"]
        url = image_url if isinstance(image_url, str) else image_url["url"]
        return {"type": "input_image", "image_url": url, "detail": part.get("detail", "auto")}
    if part["type"] in ("file", "input_file"):
        file = part.get("file") or part
        named = {"filename": file["filename"]} if file.get("filename") else {}
        return {"type": "input_file", "file_data": file["file_data"]} | named
    if role == "assistant":
        return {"type": "output_text", "text": part["text"], "annotations": []}
    return {"type": "input_text", "text": part["text"]}


def _function_call(given: dict[str, Any], where: str, tenant: str) -> Item:
    call = read_part(given, FunctionCall, where)
    arguments_of(call.arguments, f"{where}.arguments")
    called = {"call_id": call.call_id, "name": call.name, "arguments": call.arguments or "{}"}
    return called | _namespace(call)


def _custom_call(given: dict[str, Any], where: str, tenant: str) -> Item:
    call = read_part(given, CustomCall, where)
    return {"call_id": call.call_id, "name": call.name, "input": call.input} | _namespace(call)


def _namespace(call: FunctionCall | CustomCall) -> Item:
    return {} if call.namespace is None else {"namespace": call.namespace}


def _output(given: dict[str, Any], where: str, tenant: str) -> Item:
    output = read_part(given, FunctionOutput, where)
    content_of(output.output, f"{where}.output")
    named = {} if output.name is None else {"name": output.name}
    return {"call_id": output.call_id, "output": output.output} | named


def _reasoning(given: dict[str, Any], where: str, tenant: str) -> Item:
    reasoning = read_part(given, ReasoningItem, where)
    content = reasoning.content or []
    if reasoning.encrypted_content and not content:
        text = unseal(REASONING, tenant, reasoning.encrypted_content)
        if text is None:
            # Another server's.
            ignore(f"{where}.encrypted_content")
        else:
            content = [ReasoningPart(type="reasoning_text", text=text)]
    parts = {"summary": reasoning.summary, "content": content}
    return {
        name: [{"type": part.type, "text": part.text} for part in texts]
        for name, texts in parts.items()
    }


def _compaction(given: dict[str, Any], where: str, tenant: str) -> Item:
    sealed = read_part(given, CompactionItem, where).encrypted_content
    summary = unseal(COMPACTION, tenant, sealed)
    if summary is None:
        raise field_error(
            f"{where}.encrypted_content",
            "can't be read: it is from another server or of another tenant, or was changed; send "
            "the conversation itself",
            code="unsupported",
        )
    return {"encrypted_content": sealed, "summary": summary}


def _mcp(kind: type[msgspec.Struct]) -> Callable[[dict[str, Any], str, str], Item]:
    """Return the reader of an item about an MCP server, which becomes an item as it came."""

    def read(given: dict[str, Any], where: str, tenant: str) -> Item:
        item = msgspec.structs.asdict(read_part(given, kind, where))
        if "arguments" in item:
            arguments_of(item["arguments"], f"{where}.arguments")
        return item | ({"status": "failed"} if item.get("error") else {})

    return read


def _reference(given: dict[str, Any], where: str, tenant: str) -> Item:
    read_part(given, ItemReference, where)
    return {}


_KINDS: dict[str, tuple[str, Callable[[dict[str, Any], str, str], Item]]] = {
    "message": ("msg_", _message),
    "function_call": ("fc_", _function_call),
    "function_call_output": ("fco_", _output),
    "custom_tool_call": ("ctc_", _custom_call),
    "custom_tool_call_output": ("ctco_", _output),
    REASONING: ("rs_", _reasoning),
    COMPACTION: ("cmp_", _compaction),
    REFERENCE: ("", _reference),
    MCP_CALL: ("mcp_", _mcp(McpCall)),
    MCP_LIST: ("mcpl_", _mcp(McpListTools)),
    MCP_REQUEST: ("mcpr_", _mcp(McpApprovalRequest)),
    MCP_RESPONSE: ("mcpa_", _mcp(McpApprovalResponse)),
}
"""The types of items: the prefix of new ids, and the reader."""

_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")

_BUILT_IN = frozenset(
    {
        "apply_patch_call",
        "apply_patch_call_output",
        "code_interpreter_call",
        "computer_call",
        "computer_call_output",
        "file_search_call",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "program",
        "program_output",
        "shell_call",
        "shell_call_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)
"""The types of items of built-in tools, which are left out like the tools themselves."""


# --- turns for a chat template ------------------------------------------------------------------


def turns_of(items: Iterable[Item]) -> list[Turn]:
    """Return the turns of items that `items_of` has read.

    Reasoning, text and calls of the model that follow each other are one turn of the assistant,
    as far as they could have been written so, in any order.
    """
    turns: list[Turn] = []
    # The assistant's turn so far.
    spoken: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    # Results that come with their calls, of MCP servers.
    results: list[Turn] = []
    names: dict[str, str] = {}

    def end_turn() -> None:
        if spoken or calls:
            called = {"tool_calls": [*calls]} if calls else {}
            turns.append(turn_of({"role": "assistant", "content": ""} | spoken | called, "input"))
            turns.extend(results)
            spoken.clear()
            calls.clear()
            results.clear()

    def end_turn_if_begun() -> None:
        """Reasoning alone does not begin a turn."""
        if calls or spoken.keys() - {"reasoning_content"}:
            end_turn()

    for item in items:
        if calls and len(results) == len(calls):
            end_turn()
        match item["type"]:
            case "mcp_list_tools" | "mcp_approval_request" | "mcp_approval_response":
                pass
            case "mcp_call":
                name = flat_name(item["name"], item["server_label"])
                calls.append(tool_call(item["id"], name, item["arguments"]))
                result: Turn = {
                    "role": "tool",
                    "content": result_text(item["output"], item["error"]),
                    "name": name,
                }
                results.append(result | {"tool_call_id": item["id"]})
            case "reasoning":
                end_turn_if_begun()
                text = "\n".join(part["text"] for part in item["content"] or item["summary"])
                if text:
                    before = spoken.get("reasoning_content")
                    spoken["reasoning_content"] = f"{before}\n{text}" if before else text
            case "function_call" | "custom_tool_call" as kind:
                name = flat_name(item["name"], item.get("namespace"))
                names[item["call_id"]] = name
                custom = kind == "custom_tool_call"
                arguments = {INPUT: item["input"]} if custom else item["arguments"]
                calls.append(tool_call(item["call_id"], name, arguments))
            case "function_call_output" | "custom_tool_call_output":
                end_turn()
                output = content_of(item["output"], "input")
                turn: Turn = {"role": "tool", "content": output, "tool_call_id": item["call_id"]}
                named = item.get("name") or names.get(item["call_id"])
                turns.append(turn if named is None else turn | {"name": named})
            case "compaction":
                end_turn()
                turns.append({"role": "assistant", "content": item["summary"]})
            case _ if item["role"] == "assistant":
                # LiteLLM puts the text of a turn after its calls, before their results.
                if not calls or "content" in spoken:
                    end_turn_if_begun()
                # Its own reasoning has precedence.
                spoken |= message_of(item)
            case _:
                end_turn()
                turns.append(turn_of(message_of(item), "input"))
    end_turn()
    return turns
