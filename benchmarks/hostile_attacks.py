"""Attacks of hostile.py: what one client can do to a pipeline with a few lines of code.

Each attack is a public coroutine function, runs in its own process, is bounded in count and time,
and connects to 127.0.0.1 only.

Model files are not among them: a client can't have one read, only the operator or a client that may
load models. Files with excessive claims are in tests/text/test_gguf.py, and in test_gguf_model.py
of the executor's tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import hostile_images
import hostile_surroundings
import httpx
from harness import http_post
from hostile_attacker import HOLD_S, LIMIT_S, Attacker, attacks_of
from hostile_rig import generate

MIB = 1 << 20
LONG = {"max_new_tokens": 500, "ignore_eos": True, "temperature": 0}


# --- processes that ended -------------------------------------------------------------------------


async def long_path(attacker: Attacker) -> None:
    """A path of 1.2 MB, which errors and logs might quote."""
    await attacker.call("/update_weights_from_disk", {"model_path": "x" * 1_200_000})


async def long_field(attacker: Attacker) -> None:
    """An unknown field with a name of 1.2 MB, over Redis."""
    await attacker.ends(await attacker.publish([{"prompt": "a", "x" * 1_200_000: 1}]))


async def weight_arguments(attacker: Attacker) -> None:
    """Impossible paths, headers, addresses, sizes and dtypes for weight operations."""
    nested = attacker.folder / "nested.safetensors"
    _write_safetensors(nested, b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    small = attacker.folder / "float4.safetensors"
    _write_safetensors(small, b'{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}', b"\0")
    for path in ("x" * 5000, "a\0b", "/etc/passwd/x", "\ud800", str(nested), str(small), "~nobody"):
        body = json.dumps({"model_path": path}).encode()
        await attacker.call("/update_weights_from_disk", body, name="from_disk", limit_s=5.0)
    group: dict[str, Any] = {"master_port": 1, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    for changed in (
        {"master_address": "h" * 70},
        {"master_address": "127.0.0.1\0"},
        {"master_address": "127.0.0.1", "world_size": 2**41},
        {"master_address": "127.0.0.1", "rank_offset": -(2**41)},
        {"master_address": "127.0.0.1", "master_port": 2**41},
    ):
        await attacker.call(
            "/init_weights_update_group", group | changed, name="init_group", limit_s=5.0
        )
    for dtype, shape in (("float4_e2m1fn_x2", [2]), ("float32", [2**62, 2**62]), ("x", [-1])):
        body = {"names": ["a"], "dtypes": [dtype], "shapes": [shape], "group_name": "none"}
        await attacker.call(
            "/update_weights_from_distributed", body, name="distributed", limit_s=5.0
        )


async def many_prompts(attacker: Attacker) -> None:
    """200,000 prompts in one call of 0.8 MB."""
    body = {"text": ["a"] * 200_000, "sampling_params": {"max_new_tokens": 1}}
    await attacker.call("/generate", body)


async def long_tracestate(attacker: Attacker) -> None:
    """A usual request with 70 MB in its tracestate."""
    trace = {"traceparent": f"00-{1:032x}-{1:016x}-01", "tracestate": b"x" * (70 * MIB)}
    await attacker.ends(await attacker.publish([{"prompt": "a"}], **trace))


async def large_result(attacker: Attacker) -> None:
    """64 samples with the top 20 logprobs per token, over HTTP and Redis."""
    sampling: dict[str, Any] = {"n": 64, "max_new_tokens": 300, "ignore_eos": True}
    body = {
        "text": "1 + 1 =",
        "return_logprob": True,
        "top_logprobs_num": 20,
        "sampling_params": sampling,
    }
    request = {
        "prompt": "1 + 1 =",
        "n": 64,
        "tenant": "flood",
        "sampling": {"max_tokens": 300, "ignore_eos": True, "logprobs": 20},
    }
    ids = await attacker.publish([request])
    await asyncio.gather(attacker.call("/generate", body), attacker.ends(ids))


async def refused_result(attacker: Attacker) -> None:
    """A result that the server refuses. The bundled model can't exceed a server's default limit of
    512 MB, so the limit is set to a megabyte."""
    request = {
        "prompt": "1 + 1 =",
        "n": 64,
        "tenant": "flood",
        "stream": False,
        "sampling": {"max_tokens": 60, "ignore_eos": True, "logprobs": 20},
    }
    async with attacker.bus() as client:
        await client.config_set("proto-max-bulk-len", MIB)
        try:
            await attacker.ends(await attacker.publish([request]))
        finally:
            await client.config_set("proto-max-bulk-len", 512 * MIB)


# --- stalls ---------------------------------------------------------------------------------------


async def tokenize_http(attacker: Attacker) -> None:
    """A text of 15 MB whose tokens the gateway must return."""
    text = "98 + 25 = 123. " * MIB
    body = {"text": text[: 15 * 1_000_000], "return_logprob": True, "logprob_start_len": 0}
    await attacker.call("/generate", body)


async def tokenize_bus(attacker: Attacker) -> None:
    """Eight prompts of 3.9 MB, just below the limit of a request."""
    text = ("98 + 25 = 123. " * MIB)[:3_900_000]
    await attacker.ends(await attacker.publish([{"prompt": text, "tenant": "flood"}] * 8))


async def chat_text(attacker: Attacker) -> None:
    """The same as a conversation, through the chat template."""
    text = ("98 + 25 = 123. " * MIB)[:3_900_000]
    request = {"messages": [{"role": "user", "content": text}], "tenant": "flood"}
    await attacker.ends(await attacker.publish([request] * 4))


async def slow_connections(attacker: Attacker) -> None:
    """4,200 connections that send their request byte by byte."""
    writers = await attacker.open(4200, b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: ")
    end = time.monotonic() + HOLD_S
    while time.monotonic() < end:
        for writer in writers:
            if not writer.transport.is_closing():
                writer.write(b"a")
        await asyncio.sleep(1.0)
    attacker.hang_up(writers)


async def idle_connections(attacker: Attacker) -> None:
    """1,100 connections that send nothing, with a limit of 1,024 open files."""
    writers = await attacker.open(1100)
    await asyncio.sleep(HOLD_S)
    attacker.hang_up(writers)


async def half_bodies(attacker: Attacker) -> None:
    """150 requests that announce 16 MB, and send half of it."""
    size = 16 * MIB
    head = f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {size}\r\n"
    writers = await attacker.open(150, head.encode() + b"\r\n")
    part = b" " * MIB
    for _ in range(8):
        for writer in writers:
            if not writer.transport.is_closing():
                writer.write(part)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.gather(*(w.drain() for w in writers), return_exceptions=True)
    await asyncio.sleep(HOLD_S / 2)
    attacker.hang_up(writers)


async def quadratic_stream(attacker: Attacker) -> None:
    """A long stream with logprobs whose events each repeat all before; the client reads slowly."""
    sampling = {"n": 16, "max_new_tokens": 1900, "ignore_eos": True}
    body = {"text": "1 + 1 =", "stream": True, "return_logprob": True, "top_logprobs_num": 20}
    content = json.dumps(body | {"sampling_params": sampling}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", attacker.target.http_port)
    writer.write(http_post("/generate", content, "X-Tenant: flood"))
    total, end = 0, time.monotonic() + LIMIT_S - 5
    while time.monotonic() < end and (part := await reader.read(256 << 10)):
        total += len(part)
        await asyncio.sleep(0.005)
    attacker.told[f"{total / 1e6:.0f} MB read"] += 1
    writer.transport.abort()


async def many_names(attacker: Attacker) -> None:
    """A safetensors file with a header of 1.5 million tensors, none of the model's."""
    entries = ",".join(
        f'"t{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(1_500_000)
    )
    path = attacker.folder / "names.safetensors"
    _write_safetensors(path, b"{" + entries.encode() + b"}")
    await attacker.call("/update_weights_from_disk", {"model_path": str(path)})
    path.unlink()


async def dead_group(attacker: Attacker) -> None:
    """A weights group at an address that accepts and stays silent, beside another operation."""
    with socket.create_server(("127.0.0.1", 0), backlog=8) as silent:
        body = {
            "master_address": "127.0.0.1",
            "master_port": silent.getsockname()[1],
            "rank_offset": 1,
            "world_size": 2,
            "backend": "gloo",
        }
        await _beside(attacker, attacker.call("/init_weights_update_group", body))


async def fifo_path(attacker: Attacker) -> None:
    """Weights from a FIFO without a writer, beside another operation."""
    folder = attacker.folder / "fifo"
    folder.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkfifo(folder / "model.safetensors")
    body = {"model_path": str(folder)}
    await _beside(attacker, attacker.call("/update_weights_from_disk", body))


async def _beside(attacker: Attacker, stuck: Awaitable[object]) -> None:
    """Run another weight operation while this one is stuck; then cancel the stuck one."""
    stuck_task = asyncio.ensure_future(stuck)
    await asyncio.sleep(2.0)
    start = time.monotonic()
    for path in ("/get_weight_version", "/health"):
        await attacker.call(path, method="GET")
    # It has no tensor of the model, so it is refused as soon as it is read.
    empty = attacker.folder / "empty.safetensors"
    _write_safetensors(empty, b"{}")
    answer = await attacker.call(
        "/update_weights_from_disk", {"model_path": str(empty)}, name="another update", limit_s=10.0
    )
    if answer is None:
        waited_s = time.monotonic() - start
        attacker.broken.append(f"another weight operation has no answer after {waited_s:.0f} s")
    stuck_task.cancel()
    await asyncio.wait({stuck_task})


async def http_flood(attacker: Attacker) -> None:
    """3,000 long requests of one HTTP client at once, with its highest priority."""
    body = {"text": "1 + 1 =", "sampling_params": LONG, "priority": 0}

    async def one() -> None:
        try:
            attacker.told[await generate(attacker.target, body, "flood")] += 1
        except OSError as error:
            attacker.told[type(error).__name__] += 1

    flood = [asyncio.create_task(one()) for _ in range(3000)]
    _, unanswered = await asyncio.wait(flood, timeout=LIMIT_S - 5)
    attacker.told["without an answer"] += len(unanswered)
    for task in unanswered:
        task.cancel()
    await asyncio.gather(*unanswered, return_exceptions=True)


async def bus_flood(attacker: Attacker, count: int = 9000) -> None:
    """9,000 long requests of one tenant on the queue, below its high-water mark."""
    sampling = {"max_tokens": 500, "ignore_eos": True}
    request = {"prompt": "1 + 1 =", "tenant": "flood", "stream": False, "sampling": sampling}
    await attacker.publish([request] * count)
    await asyncio.sleep(HOLD_S)


async def queue_flood(attacker: Attacker) -> None:
    """30,000 of them, above the high-water mark."""
    await bus_flood(attacker, 30_000)


# --- hostile values -------------------------------------------------------------------------------


async def odd_bodies(attacker: Attacker) -> None:
    """Nesting of 10,000 and numbers of 10^30 in all places that take JSON."""
    deep = b"[" * 10_000 + b"]" * 10_000
    huge = b"1" + b"0" * 30
    for value in (deep, huge, b"1e999", b"-" + huge, b'"\\ud800"'):
        for path, field in (
            ("/generate", b"text"),
            ("/generate", b"input_ids"),
            ("/generate", b"sampling_params"),
            ("/generate", b"priority"),
            ("/update_weights_from_distributed", b"shapes"),
            ("/pause_generation", b"mode"),
            ("/abort_request", b"rid"),
            ("/update_weight_version", b"new_version"),
        ):
            await attacker.call(path, b'{"%s":%s}' % (field, value), name="odd")
    await attacker.call("/continue_generation", {})
    async with attacker.bus() as client:
        bodies = [b'{"prompt":%s}' % value for value in (deep, huge, b"1e999")]
        ids = [await client.xadd("nano:requests", {"json": body}) for body in bodies]
    await attacker.ends(ids)


async def large_integers(attacker: Attacker) -> None:
    """Schemas, tools and arguments with integers of 31 and 4,000 digits, over each interface and
    Redis, on connections that stay open."""
    talk = {"messages": [{"role": "user", "content": "1 + 1 ="}], "max_tokens": 2}
    short = {"input": "a", "max_output_tokens": 2}

    def bodies(large: int) -> list[tuple[str, dict[str, Any]]]:
        schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": large}}}
        function = {"name": "f", "parameters": schema, "strict": True}
        named = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        flat = {"type": "json_schema", "name": "n", "schema": schema}
        sampling = {"max_tokens": 2, "structured_outputs": {"json": schema}}
        return [
            ("/v1/completions", {"prompt": "1 + 1 =", "max_tokens": 2, "response_format": named}),
            ("/v1/completions", {"prompt": [large], "seed": large, "max_tokens": large}),
            (
                "/v1/chat/completions",
                talk | {"tools": [{"type": "function", "function": function}]},
            ),
            ("/v1/responses", short | {"tools": [{"type": "function"} | function]}),
            ("/v1/responses", short | {"text": {"format": flat}}),
            ("/v1/messages", talk | {"tools": [{"name": "f", "input_schema": schema}]}),
            ("/v1/messages", talk | {"output_config": {"format": flat}}),
            ("/inference/v1/generate", {"token_ids": [5], "sampling_params": sampling}),
            ("/v2/models/tiny/generate", {"text_input": "a", "sampling_parameters": sampling}),
            ("/generate", {"text": "a", "priority": large}),
        ]

    asked = bodies(10**30) + bodies(int("9" * 4000))
    constraint = {"json_schema": {"type": "integer", "maximum": 10**30}}
    entry = {"prompt": "a", "sampling": {"max_tokens": 2, "constraint": constraint}}

    async def one() -> None:
        async with httpx.AsyncClient(base_url=attacker.target.url, timeout=LIMIT_S) as client:
            for path, body in asked:
                try:
                    answer = await client.post(path, json=body, headers={"X-Tenant": "flood"})
                except httpx.HTTPError as error:
                    attacker.broken.append(f"{path}: {type(error).__name__}")
                    continue
                attacker.told[f"{path} {answer.status_code}"] += 1
                if answer.status_code >= 500:
                    attacker.broken.append(f"{path}: status {answer.status_code}")

    ids = await attacker.publish([entry] * 20)
    await asyncio.gather(attacker.ends(ids), *(one() for _ in range(16)))


async def long_field_name(attacker: Attacker) -> None:
    """A field name of 15 MB, which errors might compare and quote."""
    for _ in range(4):
        answer = await attacker.call("/generate", {"text": "a", "x" * 15_000_000: 1})
        if answer is not None and len(answer.content) > 10_000:
            attacker.broken.append(f"{len(answer.content)} bytes of an error came back")


async def web_pages(attacker: Attacker) -> None:
    """Requests that a web page can send from a browser without permission: all must be refused."""
    evil = "http://evil.example"
    simple = {"Content-Type": "text/plain", "Origin": evil}
    rebound = {"Host": f"evil.example:{attacker.target.http_port}"}
    small = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
    for path, body, headers in (
        ("/generate", small, simple),
        ("/generate", small, {"Origin": evil}),
        ("/generate", small, {"Content-Type": "text/plain"}),
        ("/generate", small, rebound),
        ("/abort_request", {"abort_all": True}, simple),
        ("/flush_cache", None, {"Origin": evil}),
        ("/pause_generation", {"mode": "in_place"}, simple),
        ("/release_memory_occupation", None, {"Sec-Fetch-Site": "cross-site"}),
        ("/release_memory_occupation", None, rebound),
    ):
        method = "GET" if body is None else "POST"
        answer = await attacker.call(path, body, method=method, headers=headers, limit_s=5.0)
        if answer is not None and answer.status_code < 400:
            attacker.broken.append(f"{method} {path} with {', '.join(headers)} is done")
    await attacker.call("/resume_memory_occupation", {})
    await attacker.call("/continue_generation", {})


# --- stored calls ---------------------------------------------------------------------------------

STORED = 60
STORED_BYTES = 3_500_000
"""Bytes of a response's record; 60 of them are more than `bus.calls_max_bytes`."""


async def stored_responses(attacker: Attacker) -> None:
    """60 stored responses of 3.5 MB, four at a time: they end at the tenant's share, and take
    nothing that another tenant has stored."""
    path, mine = "/v1/responses", {"X-Tenant": "mine", "Idempotency-Key": str(time.time_ns())}
    small: dict[str, Any] = {"input": "a", "max_output_tokens": 1}
    first = await attacker.call(path, small, headers=mine, name="mine")
    large = json.dumps(small | {"metadata": {"x": "x" * STORED_BYTES}}).encode()
    answers: list[httpx.Response | None] = []

    for _ in range(STORED // 4):
        answers += await asyncio.gather(*(attacker.call(path, large) for _ in range(4)))
    refused = [each for each in answers if each is not None and each.status_code == 429]
    if not refused:
        attacker.broken.append(f"{STORED * STORED_BYTES} bytes are stored for one tenant")
    if not all(
        "stored_calls_full" in each.text and "retry-after" in each.headers for each in refused
    ):
        attacker.broken.append("a refusal has not its code and Retry-After")
    again = await attacker.call(path, small, headers=mine, name="mine")
    if first is None or again is None or again.json().get("id") != first.json()["id"]:
        attacker.broken.append("another tenant's stored response is gone")
    new = await attacker.call(path, small, headers={"X-Tenant": "new"}, name="new")
    if new is None or not new.is_success:
        attacker.broken.append("a new tenant may store nothing")


# --- costly grammars ------------------------------------------------------------------------------

AT_ONCE = 16

_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def _lark(number: int) -> str:
    """Return a grammar that was not sent before, so that no refusal is cached."""
    return f"start: T\nT: /(.*a.{{12}}.*)/ & /(.*b.{{12}}.*)/ & ~/(.*c.{{12}}.*)/\n// {number}"


def _schema(number: int) -> dict[str, Any]:
    """Return a schema whose patterns no text matches together."""
    patterns = [{"type": "string", "pattern": f"^.*{c}.{{12}}$"} for c in "ab"]
    return {"type": "object", "properties": {f"p{number}": {"allOf": patterns}}}


def _by_each_way(number: int) -> tuple[str, dict[str, Any]]:
    """Return a path and a body with a grammar; each interface in turn."""
    chat = {"messages": [{"role": "user", "content": "a"}], "model": "tiny", "max_tokens": 60}
    function = {"name": f"f{number}", "parameters": _schema(number), "strict": True}
    strict = {"tools": [{"type": "function", "function": function}]}
    answer = {"structured_outputs": {"grammar": _lark(number)}}
    beside = {"tools": [{"type": "function", "function": {"name": "g", "parameters": _CITY}}]}
    form = {"format": {"type": "json_schema", "schema": _schema(number)}}
    blank = {"text": "a", "sampling_params": {"ebnf": "root ::= x" + "\n" * (15_000 + number)}}
    ways: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "a", "model": "tiny", "max_tokens": 60} | answer),
        ("/v1/chat/completions", chat | answer),
        ("/v1/chat/completions", chat | answer | beside),
        ("/v1/chat/completions", chat | strict),
        ("/v1/chat/completions", chat | strict | {"tool_choice": "required"}),
        ("/v1/messages", chat | {"output_config": form}),
        ("/generate", blank),
    ]
    return ways[number % len(ways)]


async def _keep_asking(
    attacker: Attacker, make: Callable[[int], tuple[str, dict[str, Any]]]
) -> None:
    """Send `AT_ONCE` requests at a time, repeatedly."""
    numbers, end = itertools.count(time.time_ns() % 1_000_000), time.monotonic() + HOLD_S

    async def one() -> None:
        while time.monotonic() < end:
            path, body = make(next(numbers))
            await attacker.call(path, body)

    await asyncio.gather(*(one() for _ in range(AT_ONCE)))


async def grammars(attacker: Attacker) -> None:
    """Sixteen costly grammars at once, over each interface."""
    await _keep_asking(attacker, _by_each_way)


def _costly_masks(number: int) -> tuple[str, dict[str, Any]]:
    regex = f"(((a{{1,100}}){{1,100}}){{1,100}}){{1,{100 + number % 100}}}"
    params = {"regex": regex, "max_new_tokens": 400, "n": 4}
    return "/generate", {"text": "aaaa", "sampling_params": params}


async def masks(attacker: Attacker) -> None:
    """Grammars that compile quickly, and whose states grow with each step."""
    await _keep_asking(attacker, _costly_masks)


def _write_safetensors(path: Path, header: bytes, data: bytes = b"") -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


BY_NAME = {
    **attacks_of(globals()),
    **attacks_of(vars(hostile_images)),
    **attacks_of(vars(hostile_surroundings)),
    # The same in other surroundings.
    **{f"{kind}_log": hostile_surroundings.log_lines for kind in ("full", "closed", "unread")},
    "serve_grammars": grammars,
    "serve_masks": masks,
    "serve_stored_responses": stored_responses,
}
"""All attacks, in the order in which they run."""

NOT_PROMISED = frozenset({"bus_flood", "queue_flood"})
"""Clients with write access to the requests stream are trusted with its order: first come, first
served, beyond the requests that the lane has in flight."""
