"""Calls of KServe V2 as a server gets them: in bytes, over gRPC and over HTTP."""

from __future__ import annotations

import gzip
import json
import random
import zlib
from functools import cache
from typing import Any, NamedTuple

from nano_inference.kserve.protobuf import METHODS, message

from .protobuf import rewired
from .tensors import (
    REGION,
    Draft,
    Input,
    Region,
    as_http,
    as_protobuf,
    crooked,
    odd_http,
    odd_json,
)
from .wire import head, post, spoiled

MODEL = "echo"
ANYTHING = ("*",)
"""Codes of a call that may be answered or refused."""


class Call(NamedTuple):
    """A call over gRPC or HTTP.

    Attributes:
        kind: What is odd about it.
        data: The message, or what is none; over HTTP all of the request.
        codes: With one of these it is refused; empty for one that is answered.
        draft: What it was made of, where it is answered with the same tensors.
        method: What is called over gRPC.
    """

    kind: str
    data: bytes
    codes: tuple[str, ...] = ()
    draft: Draft | None = None
    method: str = "ModelInfer"


def infer(rng: random.Random, region: Region) -> Call:
    """A request for the model that gives back what it is given."""
    found = crooked(rng, region, echoed=True)
    raw = as_protobuf(found.draft, MODEL).SerializeToString()
    if rng.random() < 0.6:
        return Call(found.kind, raw, found.codes, found.draft)
    raw = rewired(raw, rng) if rng.random() < 0.8 else spoiled(raw, rng)
    return Call("bytes", raw, ANYTHING)


def call(rng: random.Random, region: Region) -> Call:
    """Any method's, most of them of `infer`."""
    if rng.random() < 0.6:
        return infer(rng, region)
    method = rng.choice([each for each in METHODS.values() if not each.streams])
    asked: Any = method.request()
    names = (MODEL, "other", "", "\x00", "é" * 300, "x" * 70_000, REGION, "../..")
    for field in asked.DESCRIPTOR.fields:
        if field.type == field.TYPE_STRING and not field.is_repeated and rng.random() < 0.7:
            setattr(asked, field.name, rng.choice(names))
        elif field.type == field.TYPE_UINT64:
            setattr(asked, field.name, rng.choice((0, 1, 4096, 2**40, 2**63, 2**64 - 1)))
    if method.name == "SystemSharedMemoryRegister":
        asked.key = rng.choice(
            ("/none", "", "/", "/../etc/passwd", "none", "/a/b", "/" + "x" * 5000)
        )
    raw = asked.SerializeToString()
    match rng.randrange(4):
        case 0:
            raw = rewired(raw, rng)
        case 1:
            raw = spoiled(raw, rng)
        case 2:
            raw = rng.randbytes(rng.randrange(200))
    return Call("method", raw, ANYTHING, method=method.name)


def region_message(key: str, size: int) -> bytes:
    """What registers the region that requests speak of."""
    asked: bytes = message("SystemSharedMemoryRegisterRequest")(
        name=REGION, key=key, byte_size=size
    ).SerializeToString()
    return asked


ODD_SAMPLING: tuple[Any, ...] = (
    *({"max_tokens": 2}, {"max_tokens": 2, "n": 3}, {"max_tokens": 1, "temperature": 0}, {}, []),
    *({"max_tokens": most} for most in (0, -1, 2**62, "2", 1.5, None, True)),
    *({"n": number} for number in (0, 300, 2**62)),
    *({"temperature": -1}, {"top_p": 5}, {"stop": ["x"] * 99}, {"colour": 1}, {"\x00": "x" * 999}),
)
ODD_TEXTS = (b"98 + 25 =", b"", b"\xff\xfe", b"\x00", b"x" * 20_000, "é\U0001f600".encode())
ODD_IDS = ([5, 6, 7], [], [-1], [768], [2**63 - 1], [1] * 3000, [0])


def of_a_lane(rng: random.Random) -> Call:
    """A call of a model that every lane has, with odd elements in the right tensors."""
    model, *tensors = rng.choice(
        (
            ("tiny", _texts("text_input", rng.choice(ODD_TEXTS)), _sampling(rng)),
            ("tiny.tokens", _ids("input_ids", rng.choice(ODD_IDS)), _sampling(rng)),
            ("tiny.best_of", _ids("input_ids", rng.choice(ODD_IDS)), _sampling(rng)),
            (
                "tiny.score",
                _ids("prompt_ids", rng.choice(ODD_IDS)),
                _ids("completion_ids", rng.choice(ODD_IDS)),
            ),
            ("tiny.none", _texts("text_input", b"a")),
        )
    )
    made = Draft(list(tensors), [])
    raw = as_protobuf(made, model).SerializeToString()
    return Call(model, rewired(raw, rng) if rng.random() < 0.4 else raw, ANYTHING)


def long_answer() -> Call:
    """One that takes seconds."""
    sampling = json.dumps({"max_tokens": 1500, "ignore_eos": True}).encode()
    made = Draft([_texts("text_input", b"a"), _texts("sampling_parameters", sampling)], [])
    return Call("long", as_protobuf(made, "tiny").SerializeToString())


def _sampling(rng: random.Random) -> Input:
    given = json.dumps(rng.choice(ODD_SAMPLING)).encode()
    return _texts("sampling_parameters", rng.choice((given, given, b"{", b"NaN", b"\xff")))


def _texts(name: str, *texts: bytes) -> Input:
    raw = b"".join(len(each).to_bytes(4, "little") + each for each in texts)
    return Input(name, "BYTES", [len(texts)], raw, list(texts), "raw")


def _ids(name: str, ids: list[int]) -> Input:
    raw = b"".join(each.to_bytes(8, "little", signed=True) for each in ids)
    return Input(name, "INT64", [len(ids)], raw, ids, "raw")


# --- over HTTP -----------------------------------------------------------------------------------


INFER = b"/v2/models/echo/infer"

PLACES = (
    *(b"/v2/models/echo/generate", b"/v2/models/several/generate_stream", b"/v2/repository/index"),
    *(b"/v2/models/several/generate", b"/v2/systemsharedmemory/region/r/register"),
    *(b"/v2/systemsharedmemory/region/r/unregister", b"/v2/cudasharedmemory/region/r/register"),
    *(b"/v2/repository/models/echo/load", b"/v2/logging", b"/v2/trace/setting"),
    *(b"/v2/models/echo/versions/3/infer", b"/v2/models/other/infer", INFER),
)
BODIES: tuple[dict[str, Any], ...] = (
    {"INT64": 2, "BYTES": "a", "parameters": {"stream": True}},
    {"UINT8": [1], "id": "mine"},
    {"INT32": [1, 2], "BYTES": "a", "FP32": 1.5, "BOOL": True},
    {"key": "/none", "byte_size": 64, "offset": 0},
    {"ready": True},
    {"parameters": {}},
)
TARGETS = (
    *(b"/v2", b"/v2/", b"/v2/models", b"/v2/models/", b"/v2/models//infer", b"/v2/models/%00"),
    *(b"/v2/models/%2e%2e/infer", b"/v2/models/../../admin/keys", b"/v2/models/echo/versions/"),
    *(b"/v2/models/echo/versions/9/ready", b"/v2/models/a%2Fb/c/config", b"/v2/health"),
    *(b"/v2/models/" + b"x" * 9000, b"/v2/models/" + b"/versions/1" * 500, b"/v2/models/%ff/stats"),
    *(b"/v2/systemsharedmemory/region//status", b"/v2/systemsharedmemory/region/x%00/status"),
    *(b"/v2/cudasharedmemory/status", b"/v2/models/stats", b"/v2/health/ready", b"/v2/models/echo"),
)


@cache
def bomb() -> bytes:
    """What becomes 64 MiB."""
    return gzip.compress(b" " * (64 << 20))


def http_call(rng: random.Random, region: Region) -> Call:
    """One of all kinds."""
    match rng.randrange(10):
        case 0 | 1 | 2 | 3:
            return _infer(rng, region)
        case 4 | 5:
            body, length = odd_http(crooked(rng, region, echoed=True).draft, rng)
            return Call("odd", post(INFER.decode(), body, _told(length)), ANYTHING)
        case 6:
            return _compressed(rng, region)
        case 7:
            method = rng.choice((b"GET", b"GET", b"POST", b"DELETE", b"HEAD", b"PUT"))
            target = rng.choice((*TARGETS, *PLACES))
            return Call("target", head(method, target), ANYTHING)
        case _:
            body = json.dumps(odd_json(rng.choice(BODIES), rng)).encode()
            body = spoiled(body, rng) if rng.random() < 0.3 else body
            return Call("place", post(rng.choice(PLACES).decode(), body), ANYTHING)


def _infer(rng: random.Random, region: Region) -> Call:
    found = crooked(rng, region, echoed=True)
    # Of some datatypes there is nothing that JSON could say.
    found.draft.parameters["binary_data_output"] = True
    body, length = as_http(found.draft)
    codes = found.codes and (*found.codes, "malformed")
    return Call(found.kind, post(INFER.decode(), body, _told(length)), codes, found.draft)


def _compressed(rng: random.Random, region: Region) -> Call:
    found = crooked(rng, region, echoed=True)
    found.draft.parameters["binary_data_output"] = True
    body, length = as_http(found.draft)
    coding, pack = rng.choice(((b"gzip", gzip.compress), (b"deflate", zlib.compress)))
    headers = (*_told(length), (b"Content-Encoding", coding))
    match rng.randrange(5):
        case 0:
            raw, codes = spoiled(pack(body), rng), ANYTHING
        case 1:
            raw, codes = pack(body)[:-1], ("malformed",)
        case 2:
            headers = ((b"Content-Encoding", b"gzip"),)
            raw, codes = bomb(), ("request_too_large",)
        case 3:
            raw, codes = pack(body) + b"x", ("malformed",)
        case _:
            raw, codes = pack(body), found.codes and (*found.codes, "malformed")
    return Call(f"{coding.decode()} {found.kind}", post(INFER.decode(), raw, headers), codes)


def _told(length: int | None) -> tuple[tuple[bytes, bytes], ...]:
    if length is None:
        return ()
    return ((b"Inference-Header-Content-Length", str(length).encode()),)


def odd_headers(rng: random.Random) -> tuple[tuple[str, str], ...]:
    """Metadata of a call over gRPC that means something, and what it may be besides."""
    rows = (
        *(("x-tenant", value) for value in ("t", "", "t" * 129, "a b")),
        *(("x-budget-ms", value) for value in ("60000", "a", "1e3", "9" * 19, "inf")),
        *(("traceparent", value) for value in ("00", "x" * 900, "00-" + "0" * 32 + "-1-01")),
        *(("authorization", "Bearer"), ("x-request-id", "r" * 900), ("user-agent", "Mozilla/5.0")),
        *(("origin", "http://a"), ("x-y", "~" * 4000)),
    )
    return rng.choice(((), (), (rng.choice(rows),)))
