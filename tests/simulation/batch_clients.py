"""A client of batches over gateways: each line is a request, and has exactly one answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import msgspec

from nano_inference.config import NanoInferenceError

from .calls import Call
from .gateway_checks import is_lossy
from .gateways import Asked
from .http_clients import Answers, HttpCall, Lost, body_of

PATH = "/inference/v1/generate"
ENDS = ("completed", "failed", "expired", "cancelled")
LOOK_S = 0.5
STUCK_S = 60.0
"""A batch that is not the one of which a server was to have a record may not end."""

_FORM = b'--b\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'


class BatchCall:
    """A batch by a client that goes on until it has its results."""

    def __init__(self, world: Any, calls: Sequence[Call], programs: list[str], name: str) -> None:
        """Args:
        world: The simulation.
        calls: The lines, which get what their answers have.
        programs: The gateways.
        name: The batch's own name, by which its client finds it again.
        """
        self._world: Answers = world
        self._violate, self._story = world.violate, world.story
        self._calls = {call.request.name: call for call in calls}
        self._programs, self._name = programs, name
        self._next = 0

    async def run(self) -> None:
        """Make the batch, wait for its end, and read its results."""
        try:
            while not await self._whole():
                self._world.note("batch again", self._name)
        finally:
            for call in self._calls.values():
                call.ended, call.ended_ns = True, self._world.loop.now_ns

    async def _whole(self) -> bool:
        """Return whether there are results; not if a server has lost the batch."""
        try:
            with anyio.move_on_after(STUCK_S if is_lossy(self._story) else None):
                found = await self._ended()
                lines = []
                for file_id in filter(None, (found["output_file_id"], found["error_file_id"])):
                    lines += (await self._ask("GET", f"/v1/files/{file_id}/content")).splitlines()
                self._read([msgspec.json.decode(line) for line in lines], found)
                return True
        except NanoInferenceError as error:
            if not is_lossy(self._story):
                self._violate(f"{self._name}: {error.code}: {error.message}")
                return True
        return False

    async def _ended(self) -> dict[str, Any]:
        found = await self._begun()
        while found["status"] not in ENDS:
            await anyio.sleep(LOOK_S)
            found = msgspec.json.decode(await self._ask("GET", f"/v1/batches/{found['id']}"))
        if found["status"] != "completed":
            raise NanoInferenceError(str(found["errors"]), code=found["status"])
        return found

    async def _begun(self) -> dict[str, Any]:
        lines = b"\n".join(
            msgspec.json.encode(
                {"custom_id": name, "method": "POST", "url": PATH, "body": body_of(call.request)}
            )
            for name, call in self._calls.items()
        )
        form = _FORM % (b"purpose", b"", b"batch") + _FORM % (b"file", b'; filename="in"', lines)
        kind = {"content-type": "multipart/form-data; boundary=b"}
        file = msgspec.json.decode(await self._ask("POST", "/v1/files", kind, form + b"--b--\r\n"))
        body = {"input_file_id": file["id"], "endpoint": PATH, "metadata": {"name": file["id"]}}
        while True:
            # The reply to the one before may have been lost.
            listed = msgspec.json.decode(await self._ask("GET", "/v1/batches"))["data"]
            for each in listed:
                if each["metadata"] == body["metadata"]:
                    return dict(each)
            encoded = msgspec.json.encode(body)
            try:
                answer = await self._ask("POST", "/v1/batches", {}, encoded, once=True)
                return dict(msgspec.json.decode(answer))
            except Lost:
                await anyio.sleep(LOOK_S)

    def _read(self, lines: list[dict[str, Any]], found: dict[str, Any]) -> None:
        names = [each["custom_id"] for each in lines]
        if sorted(names) != sorted(self._calls):
            self._violate(f"{self._name} has the answers {sorted(names)}")
            return
        if sum(found["request_counts"][each] for each in ("completed", "failed")) != len(names):
            self._violate(f"{self._name} counts {found['request_counts']}")
        for each in lines:
            reader = HttpCall(self._world, self._calls[each["custom_id"]], self._programs, 0)
            reader.take_line(each["response"], each["error"])

    async def _ask(
        self,
        method: str,
        path: str,
        headers: dict[str, str] | None = None,
        body: bytes = b"",
        *,
        once: bool = False,
    ) -> bytes:
        """Return an answer's body, of whichever gateway answers.

        Raises:
            NanoInferenceError: It is an error, by which no gateway asks to come again.
            Lost: There is none, if it is asked `once`.
        """
        while True:
            try:
                return await self._attempt(Asked(method, path, "batches", headers or {}, body))
            except Lost as error:
                self._world.note("lost", self._name, str(error))
                if once:
                    raise
            await anyio.sleep(LOOK_S)

    async def _attempt(self, asked: Asked) -> bytes:
        self._next += 1
        gateway = self._world.gateways.get(self._programs[self._next % len(self._programs)])
        if gateway is None:
            raise Lost("it does not run")
        connection = gateway.connect(asked)
        content, start = b"", None
        try:
            while start is None or start["more_body"]:
                message = await connection.read()
                if message is None:
                    raise Lost("the gateway is gone")
                if start is None:
                    start = {"more_body": True, **message}
                    continue
                content += message.get("body", b"")
                start["more_body"] = message.get("more_body", False)
        finally:
            connection.close()
        if start["status"] < 400:
            return content
        error = msgspec.json.decode(content)["error"]
        if start["status"] in (429, 503):
            raise Lost(error["code"])
        raise NanoInferenceError(error["message"], code=error["code"])
