"""Requests as bytes, and answers read back from bytes."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

Shape = Literal["openai", "anthropic", "kserve", "ollama"]
"""The shape of errors."""

Refusals = frozenset[tuple[int, str]]
"""Statuses with their codes."""

MALFORMED: Refusals = frozenset({(400, "malformed")})

HOST = (b"Host", b"localhost")
JSON = (b"Content-Type", b"application/json")
Headers = Iterable[tuple[bytes, bytes]]

_KEYS = {"message", "type", "param", "code"}
# In the text of an answer, or as its tokens where it has no text; see the engine of the test.
_ASKED = (
    re.compile("asked:[0-9a-f]{16}"),
    re.compile(r'"token_ids":\[[\d,]+\]'),
    re.compile(r'"(?:text|content)":"[^"]*"'),
)
# What no two keys have in common.
_OF_A_KEY = re.compile(r'"(?:id|key)":"[^"]*"|(?<=_ns":)\d+')


class Wanted(NamedTuple):
    """The answer that a request must have.

    Attributes:
        refusals: Those of which it must be one; empty for an answer without an error.
        shape: Shape of the error.
        status: Status of an answer without an error.
        last: Start of a stream's last event: its line without the id; of lines of JSON, the field
            that is true in the last one.
        same: Whether what was asked of the engine is what the usual body asks; None where
            nobody looks.
        bodiless: It answers a HEAD.
        either: Whether an answer without an error is as good as a refusal.
    """

    refusals: Refusals = frozenset()
    shape: Shape = "openai"
    status: int = 200
    last: str = ""
    same: bool | None = None
    bodiless: bool = False
    either: bool = False


class Case(NamedTuple):
    """A client's bytes on a connection of its own.

    Attributes:
        kind: What is odd about it.
        path: Path of the tested endpoint.
        pieces: What it sends; each when the server has taken those before.
        wanted: The answers, in order.
        closed: Whether the server must close the connection after the last answer.
        ends: Whether the client says that nothing more comes.
        pass_s: Seconds that pass when all is sent, on the server's clock for slow clients.
    """

    kind: str
    path: str
    pieces: tuple[bytes, ...]
    wanted: tuple[Wanted, ...]
    closed: bool = False
    ends: bool = False
    pass_s: int = 0


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


def head(method: bytes, target: bytes, headers: Headers = (), *, host: Headers = (HOST,)) -> bytes:
    """That of a request; `host` stands before the other headers."""
    lines = [b"%s %s HTTP/1.1" % (method, target)]
    lines += [b"%s: %s" % header for header in (*host, *headers)]
    return b"\r\n".join([*lines, b"", b""])


def post(path: str, body: bytes, headers: Headers = ()) -> bytes:
    """A request with a body of JSON, as nearly all clients send it."""
    length = (b"Content-Length", b"%d" % len(body))
    return head(b"POST", path.encode(), (JSON, length, *headers)) + body


def chunked(parts: Iterable[bytes], extension: bytes = b"", trailer: bytes = b"") -> bytes:
    """A body in chunks, to its end."""
    made = (b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in parts if part)
    return b"".join(made) + b"0\r\n" + trailer + b"\r\n"


def spoiled(raw: bytes, rng: random.Random, odd: bytes = b"") -> bytes:
    """Some bytes changed, left out, said twice or added.

    Args:
        odd: Bytes that take the place of others; without any a bit is another.
    """
    data = bytearray(raw)
    for _ in range(rng.randrange(1, 5)):
        place = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0 if place < len(data):
                data[place] = rng.choice(odd) if odd else data[place] ^ 1 << rng.randrange(8)
            case 1:
                del data[place : place + rng.randrange(1, 30)]
            case 2:
                data[place:place] = data[max(0, place - rng.randrange(1, 30)) : place]
            case 3:
                runs = (b"\xff" * 10, b"\x80" * 9 + b"\x01", b"\x00", b"\x7f")
                data[place:place] = rng.choice(runs)
            case _:
                data[place:place] = rng.randbytes(rng.randrange(1, 20))
    return bytes(data)


async def read_answer(reader: asyncio.StreamReader, *, bodiless: bool = False) -> Answer:
    """The next answer of a connection.

    Raises:
        asyncio.IncompleteReadError: The connection was closed before its end.
    """
    status, headers = await _read_head(reader)
    while status == 100:
        status, headers = await _read_head(reader)
    body = b""
    if bodiless:
        pass
    elif headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
    elif "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    else:
        body = await reader.read()
    return Answer(status, headers, body)


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
    found = (line.partition(":") for line in lines)
    return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in found}


def asked(answer: Answer) -> str:
    """Return the request to the engine as far as an answer shows it; else the whole answer."""
    text = answer.body.decode()
    found = (pattern.search(text) for pattern in _ASKED)
    return next((each[0] for each in found if each), _OF_A_KEY.sub("", text))


def check(answer: Answer, wanted: Wanted, usual: str = "") -> None:
    """Asserts that an answer is the one that must come.

    Args:
        usual: What `asked` gives for the endpoint's usual body; "" where that is not compared.
    """
    told = f"{answer.status} {answer.body[:500]!r}"
    if wanted.refusals and not (wanted.either and answer.status == wanted.status):
        assert answer.status in {status for status, _ in wanted.refusals}, told
        if not wanted.bodiless:
            code = _code(answer, wanted.shape)
            assert (answer.status, code) in wanted.refusals, told
        return
    assert answer.status == wanted.status, told
    if wanted.bodiless:
        return
    kind = answer.headers.get("content-type", "")
    streams = ("text/event-stream", "application/x-ndjson")
    assert kind.startswith(streams) == bool(wanted.last), told
    if kind == streams[1]:
        _check_lines(answer.body.decode(), wanted.last)
    elif wanted.last:
        _check_stream(answer.body.decode(), wanted.last)
    elif answer.body:
        json.loads(answer.body, parse_constant=_no_json)
    if wanted.same is not None and usual:
        assert (asked(answer) == usual) == wanted.same, told


def _code(answer: Answer, shape: Shape) -> str:
    """Return the code of an error in the interface's shape."""
    found = json.loads(answer.body, parse_constant=_no_json)
    error = found["error"]
    if shape in ("kserve", "ollama"):
        assert set(found) == {"error"}, found
        assert error.isprintable(), found
        assert 0 < len(error) < 2001, found
        return answer.headers["x-error-code"]
    assert set(error) == _KEYS, found
    if shape == "anthropic":
        assert set(found) == {"type", "error", "request_id"}, found
        assert found["type"] == "error"
        assert found["request_id"] == answer.headers.get("request-id")
    else:
        assert set(found) == {"error"}, found
        assert (error["type"] == "server_error") == (answer.status >= 500), found
    assert error["message"].isprintable(), found
    assert 0 < len(error["message"]) < 2000, found
    return str(error["code"])


def _check_stream(text: str, last: str) -> None:
    assert text.endswith("\n\n"), text[-200:]
    events = [event.split("\n") for event in text.removesuffix("\n\n").split("\n\n")]
    for lines in events:
        for line in lines:
            name, _, value = line.partition(": ")
            assert name in ("event", "id", "data"), line
            if name == "data" and value != "[DONE]":
                assert "error" not in (made := json.loads(value)) or not made["error"], line
    found = [line for line in events[-1] if not line.startswith("id: ")]
    assert found[0].startswith(last), events[-1]


def _check_lines(text: str, last: str) -> None:
    lines = [json.loads(line, parse_constant=_no_json) for line in text.split("\n")[:-1]]
    assert text.endswith("\n"), text[-200:]
    assert not any("error" in line for line in lines), text
    assert [line[last] for line in lines] == [False] * (len(lines) - 1) + [True], text


def _no_json(word: str) -> Any:
    raise AssertionError(f"{word} is no JSON")
