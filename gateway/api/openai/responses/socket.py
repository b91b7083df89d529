"""`/v1/responses` as a WebSocket: responses one after the other on one connection.

Each `response.create` is a call of `POST /v1/responses`, whose events are messages.
"""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal

import msgspec
from anyio.abc import TaskGroup

from .....config import NanoInferenceError, RequestError, shown
from ....call import CLIENT_LEFT, Call
from ....server.http import Response, decode_object, error_body, field_error, status_of, task_group
from ....server.websocket import InnerCall, Socket, Upgrade
from ....serving.fields import read_part
from .requests import ID_PREFIX

Message = dict[str, Any]

_BEGUN = b"response.created"
_ENDED = (b"response.completed", b"response.incomplete", b"response.failed")
_ENDED_WELL = ("completed", "incomplete")
# Fields of HTTP alone: all responses here are streams.
_OF_HTTP = ("stream", "stream_options")


class CancelMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Ends the response in flight, whose output so far stays."""

    type: Literal["response.cancel"]
    response_id: str | None = None
    event_id: str | None = None


class ResumeMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Goes on with the events of a stored response, after the last one that the client has."""

    type: Literal["response.resume"]
    response_id: str
    starting_after: int | None = None
    event_id: str | None = None


async def upgrade(call: Call) -> Response:
    """Accept a WebSocket; its messages are calls of their own."""

    async def serve(socket: Socket) -> None:
        async with task_group() as group:
            await ResponseSocket(socket, group).run()

    return Upgrade(serve)


class ResponseSocket:
    """One connection."""

    def __init__(self, socket: Socket, group: TaskGroup) -> None:
        self._socket = socket
        self._group = group
        # The call in flight, and the id of its response once that has begun.
        self._running: InnerCall | None = None
        self._response_id = ""
        # The last response that is not stored, and the conversation up to its end.
        self._unstored: tuple[str, list[Message]] = ("", [])

    async def run(self) -> None:
        """Serve messages until the connection is closed."""
        self._socket.working(False)
        while (text := await self._socket.receive()) is not None:
            try:
                await self._take(text)
            except NanoInferenceError as error:
                await self._send_error(status_of(error), error_body(error)["error"])
        if self._running is not None:
            # It ends, unless the connection was cut and its client may come back.
            self._running.left.set()

    async def _take(self, text: str | bytes) -> None:
        if isinstance(text, bytes):
            raise RequestError("send text, not bytes", code="malformed")
        message = decode_object(text.encode())
        match message.get("type"):
            case "response.create":
                self._check_free()
                await self._create(message)
            case "response.resume":
                self._check_free()
                resume = read_part(message, ResumeMessage)
                after = resume.starting_after
                query = b"stream=true" + (b"" if after is None else b"&starting_after=%d" % after)
                path = f"{self._socket.path}/{resume.response_id}"
                self._begin(InnerCall("GET", path, query), [], stored=True)
            case "response.cancel":
                cancel = read_part(message, CancelMessage)
                if self._running is None or cancel.response_id not in (None, self._response_id):
                    raise field_error(
                        "response_id",
                        ": no such response is in flight here",
                        remedy="send the id of one that is",
                    )
                await self._cancel()
            case kind:
                raise field_error(
                    "type",
                    f"is {shown(kind)}; it may be response.create, response.cancel or "
                    "response.resume",
                    code="unsupported",
                )

    def _check_free(self) -> None:
        if self._running is not None:
            raise RequestError(
                "a response is in flight on this connection; wait for its end, cancel it, or open "
                "another connection",
                code="response_in_flight",
            )

    async def _create(self, message: Message) -> None:
        fields = {name: each for name, each in message.items() if name not in ("type", *_OF_HTTP)}
        if fields.pop("background", None):
            raise field_error(
                "background", "is for HTTP; here each response is followed", remedy="leave it out"
            )
        generate = fields.pop("generate", True) is not False
        stored = fields.get("store") is not False
        own = fields.get("input") or []
        items: list[Message] = (
            [{"role": "user", "content": own}] if isinstance(own, str) else list(own)
        )
        if fields.get("previous_response_id") == self._unstored[0] != "":
            # Known to this connection alone.
            items = [*self._unstored[1], *items]
            fields = fields | {"input": items, "previous_response_id": None}
        if not generate:
            await self._warm_up(fields, items)
            return
        body = msgspec.json.encode(fields | {"stream": True})
        self._begin(InnerCall("POST", self._socket.path, body_sent=body), items, stored=stored)

    def _begin(self, inner: InnerCall, items: list[Message], *, stored: bool) -> None:
        self._running, self._response_id = inner, ""
        self._socket.working(True)
        self._group.start_soon(self._follow, inner, items, stored)

    async def _follow(self, inner: InnerCall, items: list[Message], stored: bool) -> None:
        async def pass_on(name: bytes, data: bytes) -> None:
            if name == _BEGUN or name in _ENDED:
                response = msgspec.json.decode(data)["response"]
                self._response_id = response["id"]
                if name in _ENDED:
                    if not stored and response["status"] in _ENDED_WELL:
                        self._unstored = (response["id"], [*items, *response["output"]])
                    self._end(inner)
            await self._socket.send(data.decode())

        inner.on_event = pass_on
        try:
            await self._socket.call(inner)
        finally:
            self._end(inner)
        if self._socket.close_code is not None:
            return
        if inner.left.is_set():
            error = RequestError(
                "the response was cancelled before it began",
                code="cancelled",
                remedy="send it again if it is still wanted",
            )
            await self._send_error(CLIENT_LEFT, error_body(error)["error"])
        elif inner.status >= 400:
            await self._send_error(inner.status, msgspec.json.decode(inner.body)["error"])

    def _end(self, inner: InnerCall) -> None:
        """A client that has the last event may send the next message."""
        if self._running is inner:
            self._running = None
            self._socket.working(False)

    async def _cancel(self) -> None:
        """End the response in flight at all gateways; its stream ends with what there is."""
        if self._response_id:
            body = msgspec.json.encode({"rid": self._response_id})
            prefix = self._socket.path.removesuffix("/v1/responses")
            await self._socket.call(InnerCall("POST", f"{prefix}/abort_request", body_sent=body))
        elif self._running is not None:
            # It waits for its place, or is being checked; it has no id yet.
            self._running.left.set()

    async def _warm_up(self, fields: Message, items: list[Message]) -> None:
        """Check a prompt, and keep it for the next message. Nothing is generated."""
        checked = {name: each for name, each in fields.items() if name != "store"}
        path = f"{self._socket.path}/input_tokens"
        body = msgspec.json.encode(checked)
        inner = await self._socket.call(InnerCall("POST", path, body_sent=body))
        found = msgspec.json.decode(inner.body)
        if inner.status != 200:
            await self._send_error(inner.status, found["error"])
            return
        response: Message = {
            "id": f"{ID_PREFIX}{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": int(time.time()),
            "model": fields.get("model", ""),
            "status": "completed",
            "store": False,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": {
                "input_tokens": found["input_tokens"],
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": 0,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": found["input_tokens"],
            },
        }
        self._unstored = (response["id"], items)
        for number, kind in enumerate(("response.created", "response.completed")):
            await self._send({"type": kind, "sequence_number": number, "response": response})

    async def _send(self, event: Message) -> None:
        await self._socket.send(msgspec.json.encode(event).decode())

    async def _send_error(self, status: int, error: Message) -> None:
        await self._send({"type": "error", "status": status, "error": error})
