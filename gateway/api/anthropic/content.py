"""Blocks of messages: which ones each role has, and the texts and images that they hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from ....config import shown
from ...server.http import FieldError, field_error
from ...serving.documents import tagged, text_in_base64
from ...serving.fields import read_part
from ...serving.images import ImageSource, image_part, of_base64, of_url, text_part
from .bodies import (
    Blocks,
    CompactionBlock,
    DocumentBlock,
    DocumentBlocks,
    DocumentFile,
    DocumentText,
    ImageAddress,
    ImageBlock,
    ImageFile,
    LeftOutBlock,
    RedactedThinkingBlock,
    Role,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolChangeBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)

T = TypeVar("T")

Part = dict[str, Any]

Shown = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock
"""The blocks that become text and images."""

Block = (
    Shown
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ToolChangeBlock
    | CompactionBlock
    | LeftOutBlock
)

_LEFT_OUT = (
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "advisor_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "mcp_tool_use",
    "mcp_tool_result",
    "mcp_tool_listing",
    "fallback",
)
"""Calls of Anthropic's own tools, which other models don't have, and their results."""

_SOURCES: dict[str, type[ImageFile | ImageAddress]] = {"base64": ImageFile, "url": ImageAddress}
_DOCUMENTS: dict[str, type[DocumentFile | DocumentText | DocumentBlocks]] = {
    "base64": DocumentFile,
    "text": DocumentText,
    "content": DocumentBlocks,
}
_TEXT: dict[str, type[Shown]] = {"text": TextBlock}
_SHOWN: dict[str, type[Shown]] = _TEXT | {
    "image": ImageBlock,
    "document": DocumentBlock,
    "search_result": SearchResultBlock,
}
_IN_RESULTS: dict[str, type[Shown]] = _SHOWN | {"tool_reference": ToolReferenceBlock}
_BLOCKS: dict[Role, dict[str, type[Block]]] = {
    "system": {**_TEXT, "tool_addition": ToolChangeBlock, "tool_removal": ToolChangeBlock},
    "user": {**_SHOWN, "tool_result": ToolResultBlock, "compaction": CompactionBlock},
    "assistant": {
        **_TEXT,
        "compaction": CompactionBlock,
        "tool_use": ToolUseBlock,
        "thinking": ThinkingBlock,
        "redacted_thinking": RedactedThinkingBlock,
    },
}
"""The blocks that messages of each role may hold."""


def read_block(given: dict[str, Any], role: Role, where: str) -> Block:
    """Read a block of a message.

    Raises:
        FieldError: It is invalid, or not of messages of this role.
    """
    kind = given.get("type")
    if kind in _LEFT_OUT and role != "system":
        return LeftOutBlock()
    found = _BLOCKS[role].get(kind) if isinstance(kind, str) else None
    if found is not None:
        return read_part(given, found, where)
    for other, blocks in _BLOCKS.items():
        if isinstance(kind, str) and kind in blocks:
            raise field_error(
                where,
                f": a block of type {shown(kind)} stands in messages of role {other!r}",
                remedy="put it there",
            )
    raise _unsupported(kind, where)


def text_of(content: str | Blocks, where: str) -> str:
    """Return a text, or blocks of text as one.

    Raises:
        FieldError: A block is invalid, or no text.
    """
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in _read_parts(content, where, _TEXT))


def result_parts(content: str | Blocks, where: str) -> list[Part]:
    """Return the parts of a tool's result.

    Raises:
        FieldError: A block is invalid.
    """
    return _read_parts(content, where, _IN_RESULTS)


def parts_of(block: Shown, where: str) -> list[Part]:
    """Return the parts of a block.

    Raises:
        FieldError: Its source can't be read.
    """
    if isinstance(block, TextBlock):
        return [text_part(block.text)]
    if isinstance(block, ImageBlock):
        return [image_part(_image(block, where))]
    if isinstance(block, ToolReferenceBlock):
        return [text_part(f"The tool {block.tool_name} can be called from now on.")]
    if isinstance(block, SearchResultBlock):
        named = {"source": block.source, "title": block.title}
        inner = _read_parts(block.content, f"{where}.content", _TEXT)
        return tagged("search_result", named, inner)
    named = {"title": block.title, "context": block.context}
    return tagged("document", named, _document(block, f"{where}.source"))


def _read_parts(content: str | Blocks, where: str, known: dict[str, type[Shown]]) -> list[Part]:
    if isinstance(content, str):
        return [text_part(content)]
    parts: list[Part] = []
    for place, given in enumerate(content):
        kind, param = given.get("type"), f"{where}[{place}]"
        found = known.get(kind) if isinstance(kind, str) else None
        if found is None:
            raise _unsupported(kind, param)
        parts += parts_of(read_part(given, found, param), param)
    return parts


def of_type(known: Mapping[str, T], given: Mapping[str, Any], where: str, may_be: str) -> T:
    """Return what is known for the `type` of a part of a body.

    Args:
        known: By types.
        given: The part.
        where: Its path in the body.
        may_be: The known types, for the error.

    Raises:
        FieldError: unsupported: the type is unknown.
    """
    kind = given.get("type")
    found = known.get(kind) if isinstance(kind, str) else None
    if found is None:
        raise field_error(f"{where}.type", f"is {shown(kind)}; {may_be}", code="unsupported")
    return found


def _document(block: DocumentBlock, where: str) -> list[Part]:
    may_be = "a document may be text, content, or a text file in base64"
    source = read_part(block.source, of_type(_DOCUMENTS, block.source, where, may_be), where)
    if isinstance(source, DocumentText):
        return [text_part(source.data)]
    if isinstance(source, DocumentBlocks):
        return _read_parts(source.content, f"{where}.content", _SHOWN)
    text = text_in_base64(source.data, source.media_type, f"{where}.media_type", f"{where}.data")
    return [text_part(text)]


def _image(block: ImageBlock, where: str) -> ImageSource:
    """Raises FieldError: the image's source is unknown, or can't be read."""
    param = f"{where}.source"
    known = of_type(_SOURCES, block.source, param, "it may be base64 or url")
    source = read_part(block.source, known, param)
    if isinstance(source, ImageFile):
        return of_base64(source.data, f"{param}.data")
    return of_url(source.url, f"{param}.url")


def _unsupported(kind: object, where: str) -> FieldError:
    known = {"image": "images are", "document": "documents are"}
    what = known.get(kind) if isinstance(kind, str) else None
    what = what or f"a block of type {shown(kind)} is"
    return field_error(where, f": {what} not supported here; send text", code="unsupported")
