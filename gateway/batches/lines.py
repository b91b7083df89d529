"""The lines of a batch: what each calls, and its line of the output or the error file."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from ...config import RequestError, field_error, shown
from ...store.batches import BatchState
from ..server.http import Answered

MOST_CUSTOM_ID = 512
"""Characters of a line's `custom_id`."""

Unrun = Literal["cancelled", "expired"]
"""Why a line was not run."""


class Line(NamedTuple):
    """A line of the input file.

    Attributes:
        number: Its number among all lines, from 0.
        custom_id: Its client's name for it; "" if it has none that can be read.
        body: The body of its call; None if it can't be run.
        refused: Why it can't be run.
    """

    number: int
    custom_id: str
    body: bytes | None
    refused: RequestError | None = None


Headers = tuple[tuple[bytes, bytes], ...]
"""In ASGI's form."""


class LineFormat(Protocol):
    """Reads and writes lines in the form of one interface.

    Attributes:
        headers: Headers of each line's call.
        unwritten: Why a line was not run that has no line in any file.
    """

    headers: Headers
    unwritten: tuple[Unrun, ...]

    def read(self, state: BatchState, number: int, text: bytes) -> Line:
        """Return a line of the input file."""

    def answered(self, state: BatchState, line: Line, answer: Answered) -> dict[str, Any]:
        """Return a line of the output file, or of the error file for a status of 400 or more."""

    def refused(self, state: BatchState, line: Line) -> dict[str, Any]:
        """Return the error file's line of a line that can't be run."""

    def unrun(self, state: BatchState, line: Line, why: Unrun) -> dict[str, Any]:
        """Return the error file's line of a line that was not run."""


class _OpenAILine(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class OpenAILines:
    """OpenAI's: `{"custom_id", "method", "url", "body"}`."""

    headers: Headers = ()
    unwritten: tuple[Unrun, ...] = ("cancelled",)

    def read(self, state: BatchState, number: int, text: bytes) -> Line:
        found, refused = _decoded(number, text, _OpenAILine, "custom_id, method, url and body")
        if found is None:
            return Line(number, _custom_id_in(text), None, refused)
        if found.method != "POST":
            refused = field_error("method", f"is {shown(found.method)}", "it must be POST")
        elif found.url != state.endpoint:
            why = f"is {shown(found.url)}"
            refused = field_error("url", why, f"it must be the batch's endpoint, {state.endpoint}")
        else:
            refused = _bad_id(found.custom_id) or _bad_body(found.body)
        body = bytes(found.body) if refused is None else None
        return Line(number, found.custom_id[:MOST_CUSTOM_ID], body, refused)

    def answered(self, state: BatchState, line: Line, answer: Answered) -> dict[str, Any]:
        response = {
            "status_code": answer.status,
            "request_id": call_id(state, line.number),
            "body": msgspec.Raw(answer.body or b"null"),
        }
        return _openai(state, line, response, None)

    def refused(self, state: BatchState, line: Line) -> dict[str, Any]:
        assert line.refused is not None, "it can't be run"
        error = {"code": line.refused.code, "message": line.refused.message}
        return _openai(state, line, None, error)

    def unrun(self, state: BatchState, line: Line, why: Unrun) -> dict[str, Any]:
        message = f"the line was not run before the batch expired ({state.window})"
        return _openai(state, line, None, {"code": "batch_expired", "message": message})


class _AnthropicLine(msgspec.Struct):
    custom_id: str
    params: msgspec.Raw


class AnthropicLines:
    """Anthropic's: `{"custom_id", "params"}`. All results are in one file."""

    headers: Headers = ((b"anthropic-version", b"2023-06-01"),)
    unwritten: tuple[Unrun, ...] = ()

    def read(self, state: BatchState, number: int, text: bytes) -> Line:
        found, refused = _decoded(number, text, _AnthropicLine, "custom_id and params")
        if found is None:
            return Line(number, _custom_id_in(text), None, refused)
        refused = _bad_id(found.custom_id) or _bad_body(found.params)
        body = bytes(found.params) if refused is None else None
        return Line(number, found.custom_id[:MOST_CUSTOM_ID], body, refused)

    def answered(self, state: BatchState, line: Line, answer: Answered) -> dict[str, Any]:
        body = msgspec.Raw(answer.body or b"null")
        if answer.status >= 400:
            return {"custom_id": line.custom_id, "result": {"type": "errored", "error": body}}
        return {"custom_id": line.custom_id, "result": {"type": "succeeded", "message": body}}

    def refused(self, state: BatchState, line: Line) -> dict[str, Any]:
        assert line.refused is not None, "it can't be run"
        error = {"type": "invalid_request_error", "message": line.refused.message}
        wrapped = {"type": "error", "error": error}
        return {"custom_id": line.custom_id, "result": {"type": "errored", "error": wrapped}}

    def unrun(self, state: BatchState, line: Line, why: Unrun) -> dict[str, Any]:
        kind = "canceled" if why == "cancelled" else why
        return {"custom_id": line.custom_id, "result": {"type": kind}}


FORMATS: dict[str, LineFormat] = {"openai": OpenAILines(), "anthropic": AnthropicLines()}
"""By `BatchState.interface`."""


def call_id(state: BatchState, number: int) -> str:
    """Return the id of a line's call, the same whichever gateway runs it."""
    return f"{state.id}-{number}"


class LineText(NamedTuple):
    """A line as it is in a file.

    Attributes:
        start, stop: Its place in the file, in bytes, its end of line included.
        content: Its bytes. A line that is too long to be run is cut off, so that no file takes more
            memory than its longest line that may be run.
    """

    start: int
    stop: int
    content: bytes


async def lines_of(parts: AsyncIterable[bytes], max_bytes: int) -> AsyncIterator[LineText]:
    """Yield the lines of a file, or of a part of it that begins and ends with lines. Blank ones
    don't count. Of a line with more than `max_bytes` at least one byte more is yielded."""
    start, length, kept = 0, 0, bytearray()
    async for part in parts:
        at = 0
        while (end := part.find(b"\n", at)) >= 0:
            stop = start + length + end + 1 - at
            if text := _unmarked(bytes(kept) + part[at:end], start):
                yield LineText(start, stop, text)
            start, length, at = stop, 0, end + 1
            kept.clear()
        length += len(part) - at
        kept += part[at : at + max(0, max_bytes + 1 - len(kept))]
    if text := _unmarked(bytes(kept), start):
        yield LineText(start, start + length, text)


def _unmarked(text: bytes, start: int) -> bytes:
    """Return a line without the file's byte order mark; b"" for a blank one."""
    if not start:
        text = text.removeprefix(b"\xef\xbb\xbf")
    return b"" if text.isspace() else text


def too_long(number: int, max_bytes: int) -> Line:
    """Return the line in place of one that is too long to be run."""
    most = f"{max_bytes} bytes, which is the most (gateway.max_body_bytes)"
    why = f"line {number + 1} has more than {most}"
    return Line(number, "", None, RequestError(why, "shorten it", code="request_too_large"))


class _Prefix(msgspec.Struct):
    """The fields that begin a prompt, in the order in which a template writes them."""

    model: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")


def prefix_of(body: bytes) -> bytes:
    """Return a key by which bodies sort whose prompts begin alike."""
    try:
        found = msgspec.json.decode(body, type=_Prefix)
    except (ValueError, RecursionError):
        return body
    return b"\0".join(bytes(each) for each in msgspec.structs.astuple(found))


def _decoded(number: int, text: bytes, kind: Any, fields: str) -> tuple[Any, RequestError | None]:
    try:
        return msgspec.json.decode(text, type=kind), None
    except (ValueError, RecursionError) as error:
        # Its client finds it by its number: it may have no id that can be read.
        why = f"line {number + 1} can't be read: {error}"
        remedy = f"it must be a JSON object in UTF-8 with {fields}"
        return None, RequestError(why, remedy, code="malformed")


class _CustomId(msgspec.Struct):
    custom_id: str = ""


def _custom_id_in(text: bytes) -> str:
    """Return the id of a line that can't be run, so that its client finds the error."""
    try:
        return msgspec.json.decode(text, type=_CustomId).custom_id[:MOST_CUSTOM_ID]
    except (ValueError, RecursionError):
        return ""


def _bad_id(custom_id: str) -> RequestError | None:
    if 0 < len(custom_id) <= MOST_CUSTOM_ID:
        return None
    why = f"is {shown(custom_id)}"
    return field_error("custom_id", why, f"it must have 1 to {MOST_CUSTOM_ID} characters")


class _Streamed(msgspec.Struct):
    stream: bool | None = None


def _bad_body(body: msgspec.Raw) -> RequestError | None:
    """Refuse a stream; the call itself checks everything else."""
    try:
        streamed = msgspec.json.decode(body, type=_Streamed).stream
    except ValueError:
        return None
    if not streamed:
        return None
    return field_error("body.stream", "is true, and lines have no streams", remedy="leave it out")


def _openai(
    state: BatchState, line: Line, response: dict[str, Any] | None, error: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        "id": f"batch_req_{call_id(state, line.number).removeprefix('batch_')}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }
