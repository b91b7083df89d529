"""Clients of gateways: they ask, lose their connections, come back, and leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import anyio
import msgspec

from nano_inference.bus.public import (
    Completion,
    CompletionChunk,
    CompletionSample,
    ErrorInfo,
    FinishReason,
    Timings,
    Usage,
)
from nano_inference.config import NanoInferenceError

from .calls import Call
from .gateways import Asked, Connection, Message, SimulatedGateway
from .loop import SimulatedLoop
from .story import Request

PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.3
"""Between two attempts of a client; each is twice as long as the one before."""

MOST_DROPS = 6
"""So often a client loses its connection by itself."""

PATIENCE_S = 8.0
"""A client with a key waits so long for the next sign of its gateway, and then asks another."""

_AGAIN = frozenset(
    ("bus_unavailable", "shutting_down", "not_ready", "overloaded", "unknown_lane", "weights_lost")
)
"""Codes of errors after which a client comes back."""

_DONE = b"[DONE]"
_UNENDED = ("queued", "in_progress")


class Answers(Protocol):
    """The parts of a simulation that clients read and write."""

    loop: SimulatedLoop
    gateways: dict[str, SimulatedGateway]
    answers: dict[str, Request]

    def note(self, *parts: str) -> None:
        """Write a line of the trace."""


class Lost(Exception):
    """The connection is lost, or its gateway asks to come again."""


class HttpCall:
    """A call over HTTP by a client that goes on until it has its answer."""

    def __init__(self, world: Answers, call: Call, programs: list[str], first: int) -> None:
        """Args:
        world: The simulation.
        call: Gets what the client reads.
        programs: The gateways.
        first: Number of the gateway that it asks first.
        """
        self._world = world
        self._call = call
        self._request = call.request
        self._programs = programs
        self._next = first
        self._drops = 0
        self._position = ""  # the id of the last event
        self._id = ""
        self._versions: dict[int, list[tuple[int, int]]] = {}
        self._reasons: dict[int, FinishReason] = {}
        self._alone_ns = world.loop.now_ns

    async def run(self) -> None:
        """Get the answer, or leave."""
        request, call = self._request, self._call
        try:
            if request.leave_ms:
                with anyio.move_on_after(request.leave_ms / 1000) as scope:
                    await self._persist()
                call.left = scope.cancelled_caught
            else:
                await self._persist()
        except NanoInferenceError as error:
            call.error = error
            self._world.note("error", request.name, error.code, error.message)
        finally:
            call.ended, call.ended_ns = True, self._world.loop.now_ns

    async def _persist(self) -> None:
        ask = self._background if self._request.interface == "background" else self._once
        pause_s = PAUSE_S
        while not await self._attempt(ask):
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _attempt(self, ask: Callable[[SimulatedGateway], Any]) -> bool:
        """Return whether the call has ended."""
        self._next += 1
        name = self._programs[self._next % len(self._programs)]
        gateway = self._world.gateways.get(name)
        if gateway is None:
            return False
        breaks = self._request.drop_ms and self._drops < MOST_DROPS
        try:
            with anyio.move_on_after(self._request.drop_ms / 1000 if breaks else None):
                await ask(gateway)
                return True
            self._drops += 1
        except Lost as error:
            self._world.note("lost", self._request.name, str(error))
        return False

    # --- a call and its answer ----------------------------------------------------------------

    def _asked(self) -> Asked:
        request = self._request
        headers = {"accept": "text/event-stream"}  # or events would have no ids
        if request.keyed:
            headers["idempotency-key"] = request.name
        if self._position:
            headers["last-event-id"] = self._position
            if not request.keyed or self._next % 2:
                path = f"/v1/streams/{self._id}"
                return Asked("GET", path, request.tenant, {"last-event-id": self._position})
        if request.budget_ms:
            headers["x-budget-ms"] = str(request.budget_ms)
        body = msgspec.json.encode(body_of(request))
        return Asked("POST", "/inference/v1/generate", request.tenant, headers, body)

    async def _once(self, gateway: SimulatedGateway) -> None:
        connection = gateway.connect(self._asked())
        try:
            start = await self._read(connection)
            self._count_time_alone()
            if start["status"] != 200:
                await self._refused(connection)
            elif self._request.interface == "stream":
                await self._stream(connection)
            else:
                self._whole(msgspec.json.decode((await self._read(connection))["body"]))
        finally:
            self._alone_ns = self._world.loop.now_ns
            connection.close()

    def _count_time_alone(self) -> None:
        now_ns = self._world.loop.now_ns
        if self._position or self._request.keyed:
            self._call.alone_ns = max(self._call.alone_ns, now_ns - self._alone_ns)

    async def _read(self, connection: Connection) -> Message:
        # Without a key, a client that goes away ends its call.
        patience_s = PATIENCE_S if self._request.keyed else None
        with anyio.move_on_after(patience_s):
            message = await connection.read()
            if message is None:
                raise Lost("the gateway is gone")
            return message
        raise Lost("nothing comes")

    async def _refused(self, connection: Connection) -> None:
        body = msgspec.json.decode((await self._read(connection))["body"])
        self._failed(body["error"])

    def _failed(self, error: Mapping[str, Any]) -> None:
        code, message = error["code"], error["message"]
        if code in _AGAIN:
            raise Lost(code)
        if code in ("expired", "lane_failed"):
            self._end("expired" if code == "expired" else "error", code, message)
            return
        raise NanoInferenceError(message, code=code)

    async def _stream(self, connection: Connection) -> None:
        failure: Mapping[str, Any] | None = None
        while True:
            message = await self._read(connection)
            event_id, data = _event_in(message.get("body", b""))
            if data == _DONE:
                break
            if not data:
                if not message.get("more_body"):
                    raise Lost("the stream ends without its end")
                continue
            self._world.note("event", self._request.name, event_id, data.decode())
            self._position = event_id
            event = msgspec.json.decode(data)
            if "error" in event:
                failure = event["error"]
                continue
            self._found(event["id"])
            for choice in event["choices"]:
                self._add(choice)
        if failure is not None:
            self._failed(failure)
        else:
            self._end("done")

    def _whole(self, answer: dict[str, Any]) -> None:
        self._world.note("answer", self._request.name, msgspec.json.encode(answer).decode())
        self._found(answer["id"])
        for choice in answer["choices"]:
            self._add(choice)
        self._end("done")

    def take_line(self, response: dict[str, Any] | None, error: Mapping[str, Any] | None) -> None:
        """Read the answer of a batch's line."""
        try:
            if response is None:
                raise NanoInferenceError(str(error), code="line_not_run")
            if response["status_code"] == 200:
                self._whole(response["body"])
            else:
                self._failed(response["body"]["error"])
        except NanoInferenceError as failure:
            self._call.error = failure
        except Lost as again:
            self._call.error = NanoInferenceError("no line ends so", code=str(again))

    def _found(self, answer_id: str) -> None:
        self._id = answer_id
        self._call.answers.add(answer_id)
        self._world.answers[answer_id] = self._request

    def _add(self, choice: Mapping[str, Any]) -> None:
        """Note a part of a choice as the bus would have brought it."""
        chunks = self._call.chunks
        index, tokens = choice["index"], tuple(choice["token_ids"])
        before = sum(len(each.token_ids) for each in chunks if each.sample_index == index)
        entries = choice["logprobs"]["content"] if tokens else ()
        versions = self._versions.setdefault(index, [])
        for span in choice["weight_versions"]:
            if span["start"] != before + (span["start"] - choice["weight_versions"][0]["start"]):
                raise NanoInferenceError("a part begins elsewhere", code="gap")
            versions.append((int(span["version"]), span["start"]))
        if choice["finish_reason"]:
            self._reasons[index] = choice["finish_reason"]
        chunk = CompletionChunk(
            request_id=self._id,
            entry_id="",
            sample_index=index,
            token_offset=before,
            token_ids=tokens,
            logprobs=tuple(each["logprob"] for each in entries),
            text="",
            finish_reason=choice["finish_reason"],
            weight_version=versions[-1][0] if versions else 0,
        )
        self._call.outputs.append(chunk)

    def _end(self, status: Any, code: str = "", message: str = "") -> None:
        if status == "done" and "abort" in self._reasons.values():
            status = "cancelled"
        samples = tuple(self._sample(index) for index in range(self._request.n))
        end = Completion(
            request_id=self._id,
            entry_id="",
            status=status,
            samples=samples,
            error=ErrorInfo(code=code, message=message) if code else None,
            usage=Usage(),
            timings=Timings(),
        )
        self._call.outputs.append(end)

    def _sample(self, index: int) -> CompletionSample:
        own = [each for each in self._call.chunks if each.sample_index == index]
        versions = tuple(self._versions.get(index, ()))
        return CompletionSample(
            sample_index=index,
            text="",
            token_ids=tuple(token for each in own for token in each.token_ids),
            logprobs=tuple(each for chunk in own for each in chunk.logprobs),
            finish_reason=self._reasons.get(index, "abort"),
            weight_version=versions[0][0] if versions else 0,
            weight_versions=versions,
        )

    # --- a response in the background ---------------------------------------------------------

    async def _background(self, gateway: SimulatedGateway) -> None:
        """Begin a response, or look at it, until it has ended."""
        request = self._request
        if not self._id:
            headers = {"idempotency-key": request.name} if request.keyed else {}
            body = msgspec.json.encode(response_body_of(request))
            asked = Asked("POST", "/v1/responses", request.tenant, headers, body)
            answer = await self._answer(gateway, asked)
        else:
            path = f"/v1/responses/{self._id}"
            answer = await self._answer(gateway, Asked("GET", path, request.tenant, {}))
        if answer is None:
            return
        self._found(answer["id"])
        if answer["status"] in _UNENDED:
            raise Lost(answer["status"])
        self._world.note("response", request.name, msgspec.json.encode(answer).decode())
        self._call.response = answer

    async def _answer(self, gateway: SimulatedGateway, asked: Asked) -> dict[str, Any] | None:
        connection = gateway.connect(asked)
        try:
            start = await self._read(connection)
            body = msgspec.json.decode((await self._read(connection))["body"])
            if start["status"] == 200:
                return dict(body)
            self._failed(body["error"])
            return None
        finally:
            connection.close()


def _event_in(part: bytes) -> tuple[str, bytes]:
    """Return the id and the data of an event; both empty for a comment."""
    event_id, data = "", b""
    for line in part.splitlines():
        name, _, value = line.partition(b": ")
        if name == b"id":
            event_id = value.decode()
        elif name == b"data":
            data = value
    return event_id, data


def body_of(request: Request) -> dict[str, Any]:
    """Return the body of a call of `/inference/v1/generate`."""
    return {
        "token_ids": request.prompt,
        "stream": request.interface == "stream",
        "priority": request.priority,
        "return_weight_versions": True,
        "sampling_params": {
            "n": request.n,
            "max_tokens": request.max_tokens,
            "min_tokens": request.min_tokens,
            "seed": request.seed,
            "temperature": request.temperature,
            "stop_token_ids": request.stop_ids,
            "ignore_eos": not request.constraint,
            "structured_outputs": {"regex": request.constraint} if request.constraint else {},
            "logprobs": 0,
        },
    }


def response_body_of(request: Request) -> dict[str, Any]:
    """Return the body of a response in the background."""
    return {
        "input": f"{request.name}?",
        "background": True,
        "max_output_tokens": request.max_tokens,
        "seed": request.seed,
        "temperature": request.temperature,
        "ignore_eos": True,
    }
