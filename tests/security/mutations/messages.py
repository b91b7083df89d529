"""HTTP itself: heads, lengths, codings, targets, methods, headers, and how bytes come."""

from __future__ import annotations

import random

from .bodies import refusal, taken, usual
from .interfaces import (
    CHAT,
    COMPLETIONS,
    INTERFACES,
    MESSAGES,
    RESPONSES,
    TOKENS,
    Interfaces,
    refused,
)
from .wire import HOST, JSON, MALFORMED, Case, Shape, Wanted, chunked, head, post

VERSION = b"/version"
KEYED = (COMPLETIONS, CHAT, TOKENS, RESPONSES)
MEDIA = refused("unsupported_media_type", 415)
NOT_FOUND = refused("not_found", 404)
NOT_ALLOWED = refused("method_not_allowed", 405)
NOT_HTTP = Wanted(MALFORMED)
LONG = b"a" * 70_000
BYTES = (b"", b";" * 999, b"application/octet-stream")
UNSURE = (b"", b";" * 999, b"application/x-www-form-urlencoded")
HEAD_TIMEOUT_S = 2

BAD_HEADS = (
    *(b"\x16\x03\x01\x00\xa5\x01\x00\r\n\r\n", b"GET /version\r\n\r\n", b"\x00" * 40 + b"\r\n\r\n"),
    *(b"GET\r\n\r\n", b"/ HTTP/1.1\r\n\r\n"),
    *(b"GET /a b HTTP/1.1\r\nHost: localhost\r\n\r\n", b"G\xc3T / HTTP/1.1\r\nHost: a\r\n\r\n"),
    *(b"GET /version HTTP/2.0\r\nHost: localhost\r\n\r\n", b"GET / HTTP/x\r\nHost: a\r\n\r\n"),
    *(b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    *(head(b"GET", VERSION, host=()), head(b"GET", VERSION, [HOST]), b"GET / HTTP/11\r\n\r\n"),
    *(head(b"GET", VERSION, [(b"X-A", value)]) for value in (b"\x00", b"a\x7f\x00", LONG)),
    *(head(b"GET", VERSION, [(name, b"a")]) for name in (b"X A", b"", b"X\x00", b"\xff", b"X-A ")),
    head(b"GET", VERSION + b"?" + LONG),
    head(b"GET", b"/" + LONG),
)
"""No HTTP, or too much of it."""

BAD_LENGTHS = (
    *(b"-5", b"+5", b"0x10", b"", b"5 5", b"5,6", b"1e3", b"\xb2", b"NaN", b"9" * 40, b"5.0"),
)

BAD_CODINGS: tuple[tuple[tuple[bytes, bytes], ...], ...] = (
    *(
        ((b"Transfer-Encoding", value),)
        for value in (b"gzip, chunked", b"xchunked", b"\x0bchunked", b"identity", b"chunked;a=b")
    ),
    ((b"Transfer-Encoding", b"chunked"),) * 2,
    ((b"Transfer-Encoding", b"chunked"), (b"Transfer-Encoding", b"identity")),
    ((b"Transfer-Encoding ", b"chunked"),),
)

BAD_CHUNKS = (
    *(b"0\r\nX-T: a\r\nContent-Length: 3\r\n\r\n",),
    *(b"zz\r\n", b"-5\r\naaaaa\r\n", b"f" * 30 + b"\r\n", b"5 \x00\r\naaaaa\r\n", b"\r\n"),
    *(b"2\r\naaa\r\n0\r\n\r\n", b"0x5\r\naaaaa\r\n", b"5\raaaaa\r\n", b"1;" + LONG),
)


def bad_head(rng: random.Random) -> Case:
    raw = rng.choice(BAD_HEADS)
    return Case("head", "", (raw,), (NOT_HTTP,), closed=True)


def bad_length(rng: random.Random, interfaces: Interfaces) -> Case:
    """Lengths and codings of which two readers might make different things."""
    interface = rng.choice(interfaces)
    body = usual(interface)
    length = (b"Content-Length", b"%d" % len(body))
    # What a reader takes for the next request must not be answered.
    hidden = head(b"GET", VERSION)
    match rng.randrange(5):
        case 0:
            raw = interface.head((JSON, (b"Content-Length", rng.choice(BAD_LENGTHS)))) + body
        case 1:
            other = (b"Content-Length", b"%d" % (len(body) + rng.choice((-1, 1, 40))))
            raw = interface.head((JSON, *rng.sample((length, other), 2))) + body + hidden
        case 2:
            raw = interface.head((JSON, *rng.choice(BAD_CODINGS))) + chunked([body]) + hidden
        case 3:
            told = rng.choice((b"0", b"4", length[1], b"99"))
            both = [(b"Content-Length", told), (b"Transfer-Encoding", b"chunked")]
            raw = interface.head((JSON, *rng.sample(both, 2))) + chunked([body]) + hidden
        case _:
            raw = interface.head((JSON, (b"Transfer-Encoding", b"chunked"))) + chunked([body])
            raw = raw.replace(b"HTTP/1.1", b"HTTP/1.0") + hidden
    return Case("length", interface.path, (raw,), (NOT_HTTP,), closed=True)


def bad_chunks(rng: random.Random, interfaces: Interfaces) -> Case:
    """A body in chunks that is wrong somewhere, or ends too early."""
    interface = rng.choice(interfaces)
    begun = interface.head((JSON, (b"Transfer-Encoding", b"chunked")))
    parts = chunked(cut(usual(interface), rng))
    if rng.random() < 0.5:
        first = parts[: -len(b"0\r\n\r\n")]
        raw = begun + first + rng.choice(BAD_CHUNKS)
        wanted = refusal(interface, MALFORMED)
        return Case("chunks", interface.path, (raw,), (wanted,), closed=True)
    raw = begun + parts[: rng.randrange(len(parts))]
    return Case("cut chunks", interface.path, (raw,), (), closed=True, ends=True)


def good_chunks(rng: random.Random, interfaces: Interfaces) -> Case:
    """A body in chunks of any size, each sent by itself."""
    interface = rng.choice(interfaces)
    begun = interface.head((JSON, (b"Transfer-Encoding", b"chunked")))
    extension = rng.choice((b"", b";a=b", b";a"))
    trailer = rng.choice((b"", b"X-T: a\r\nHost: 3\r\n"))
    raw = begun + chunked(cut(usual(interface), rng), extension, trailer)
    return Case("chunked", interface.path, tuple(cut(raw, rng)), (taken(interface),))


def cut(raw: bytes, rng: random.Random) -> list[bytes]:
    """The same in some pieces."""
    places = sorted(rng.randrange(len(raw)) for _ in range(rng.randrange(1, 6)))
    return [raw[begin:end] for begin, end in zip([0, *places], [*places, len(raw)], strict=True)]


def kinds_of_body(rng: random.Random, interfaces: Interfaces) -> Case:
    """Return a request with a wrong or odd content type or encoding."""
    interface = rng.choice(interfaces)
    body = usual(interface)
    length = (b"Content-Length", b"%d" % len(body))
    refused_kinds = (
        *(b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data; boundary=x"),
        *(b"", b"json", b"application/jsonp", b"text/json", b"application/octet-stream", b"\xff"),
        *(b"application/json, text/plain", b"application/", b"application/x+jsonx", b";" * 999),
    )
    taken_kinds = (
        *(b"Application/JSON", b"application/json ; charset=utf-8", b"application/vnd.a+json"),
    )
    if interface.shape == "kserve":
        # It takes bytes, and bodies of which nothing is said.
        refused_kinds = tuple(each for each in refused_kinds if each not in BYTES)
        taken_kinds += BYTES
    if interface.shape == "ollama":
        # Clients declare JSON as a form, or as nothing.
        refused_kinds = tuple(each for each in refused_kinds if each not in UNSURE)
        taken_kinds += UNSURE
    codings = (b"gzip", b"br", b"deflate", b"identity, gzip", b"utf-8", b"\x80", b"x" * 999)
    headers: tuple[tuple[bytes, bytes], ...]
    wanted = refusal(interface, MEDIA)
    match rng.randrange(5):
        case 0:
            headers = ((b"Content-Type", rng.choice(refused_kinds)),)
        case 1:
            headers = ()
            wanted = taken(interface) if interface.shape in ("kserve", "ollama") else wanted
        case 2:
            headers = (JSON, (b"Content-Encoding", rng.choice(codings)))
        case 3:
            headers = (JSON, (b"Content-Encoding", rng.choice((b"identity", b"", b"Identity"))))
            wanted = taken(interface)
        case _:
            headers = ((b"Content-Type", rng.choice(taken_kinds)),)
            wanted = taken(interface)
    raw = interface.head((length, *headers)) + body
    return Case("kind of body", interface.path, (raw,), (wanted,))


def targets(rng: random.Random, interfaces: Interfaces) -> Case:
    """Paths and queries."""
    interface = rng.choice(interfaces)
    path = interface.path.encode()
    ends = (b"%00", b"%0d%0a", b"/..", b"/%2e%2e", b"%ff", b"%", b"/x", b"#a")
    odd = (
        *(path + end for end in ends),
        *(b"/." + path, b"/x/.." + path, b"//" + path, b"/%2e" + path, b"*", b"/" + b"a" * 9000),
        *(b"http://localhost" + path, b"localhost:80", b"/\xc3\xa9".hex().encode(), b"/%c3%28"),
        *(path.upper(), path.replace(b"/", b"%5c"), b"/../../etc/passwd", b"/%00", b"\\" + path),
    )
    if rng.random() < 0.6:
        target = rng.choice(odd)
        shape: Shape = "anthropic" if target.startswith(b"/v1/messages/") else "openai"
        shape = "ollama" if target.startswith(b"/api/") else shape
        raw = interface.call(usual(interface)).replace(path, target, 1)
        # There are such paths, of responses by their ids.
        there = interface is RESPONSES and target.count(b"/") == 3 and target.startswith(path)
        if target.startswith(b"/v2/"):
            # Whatever is below that of models is the name of one, of which one may ask.
            shape, there = "kserve", target.startswith(b"/v2/models/")
        wanted = Wanted(NOT_ALLOWED if there else NOT_FOUND, shape)
        if target.startswith(b"http:"):
            wanted = taken(interface)
        elif not target.startswith((b"/", b"*")) or b"#" in target:
            wanted = NOT_HTTP
        return Case("target", interface.path, (raw,), (wanted,), closed=wanted is NOT_HTTP)
    queries = (b"a=1&" * 10_000, b"%00", b"?" * 99, b"&&=&", b"%ff%fe=%", b"prompt=b&stream=true")
    raw = interface.call(usual(interface)).replace(path, path + b"?" + rng.choice(queries), 1)
    return Case("query", interface.path, (raw,), (taken(interface),))


UNKNOWN_METHODS = (b"get", b"post", b"X" * 99, b"Q!#$%&'*+-.^_`|~")


def methods(rng: random.Random, interfaces: Interfaces) -> Case:
    """Any but the one that an endpoint has."""
    interface = rng.choice(interfaces)
    odd = (b"GET", b"PATCH", b"DELETE", b"OPTIONS", b"TRACE", b"HEAD")
    odd += (b"PROPFIND", b"M-SEARCH", *UNKNOWN_METHODS)
    method = rng.choice(odd)
    while method in interface.others:
        method = rng.choice(odd)
    raw = interface.call(usual(interface)).replace(interface.method, method, 1)
    wanted = Wanted(NOT_ALLOWED, interface.shape, bodiless=method == b"HEAD")
    if method in UNKNOWN_METHODS:
        wanted = NOT_HTTP
    return Case("method", interface.path, (raw,), (wanted,), closed=wanted is NOT_HTTP)


def named(rng: random.Random, interfaces: Interfaces) -> Case:
    """Headers that mean something."""
    interface = rng.choice(interfaces)
    rows: list[tuple[bytes, bytes, str, int]] = [
        *((b"X-Tenant", value, "invalid_tenant", 400) for value in (b"", b"t" * 129, b"\x80")),
        *((b"X-Budget-Ms", value, "invalid_budget", 400) for value in BUDGETS),
        *((b"X-Budget-Ms", value, "expired", 504) for value in (b"0", b"-1", b"-0.5")),
        *((b"Origin", value, "forbidden_origin", 403) for value in (b"null", b"http://a", b"\xff")),
        (b"Sec-Fetch-Site", b"cross-site", "forbidden_origin", 403),
        *((b"Anthropic-Version", value, "unsupported", 400) for value in (b"", b"2020", b"\xff")),
        *((b"Idempotency-Key", value, "invalid_idempotency_key", 400) for value in KEYS),
        *((name, value, "", 200) for name in IGNORED for value in (b"", b"\xff\xfe", b"a" * 9000)),
        *((b"X-Tenant", value, "", 200) for value in (b"t", b"t" * 128, b"a b")),
        (b"Expect", b"100-continue", "", 200),
        (b"Upgrade", b"websocket\r\nConnection: Upgrade", "", 200),
        (b"Upgrade", b"h2c\r\nConnection: Upgrade, HTTP2-Settings", "", 200),
    ]
    name, value, code, status = rng.choice(rows)
    limits = ("max", "num_predict")
    generates = any(each in str(interface.body) for each in limits) and interface in INTERFACES
    heard = {
        b"X-Tenant": generates or interface.path == "/v1/messages/count_tokens",
        b"X-Budget-Ms": generates,
        b"Anthropic-Version": interface.shape == "anthropic",
        b"Idempotency-Key": generates,
    }
    if not heard.get(name, True):
        code = ""
    wanted = refusal(interface, refused(code, status)) if code else taken(interface)
    raw = interface.call(usual(interface), [(name, value)])
    return Case("header", interface.path, (raw,), (wanted,))


BUDGETS = (
    *(b"", b"a", b"NaN", b"inf", b"1e3", b"9" * 19, b"1,5", b"0x5", b"\xb2", b"--1", b"1."),
    b"9" * 999,
)
KEYS = (b"", b"a b", b"\xff", b"k" * 256, b"a\r\nIdempotency-Key: b")
IGNORED = (
    *(b"X-Request-Id", b"traceparent", b"tracestate", b"Accept", b"Authorization", b"Cookie"),
    b"Range",
)


STREAM_CALLS: tuple[tuple[bytes, bytes, str, int], ...] = (
    (b"GET", b"/v1/streams/cmpl-0", "stream_not_found", 404),
    (b"GET", b"/v1/streams/%00?after=%ff", "stream_not_found", 404),
    (b"GET", b"/v1/streams/" + b"x" * 9000, "stream_not_found", 404),
    (b"DELETE", b"/v1/streams/%e2%80%ae", "stream_not_found", 404),
    (b"POST", b"/v1/streams/cmpl-0/cancel", "stream_not_found", 404),
    (b"GET", b"/v1/responses/resp_0", "unknown_response", 404),
    (b"GET", b"/v1/responses/resp_0?stream=true", "unknown_response", 404),
    (b"GET", b"/v1/responses/%00?starting_after=1", "invalid_request", 400),
    (b"DELETE", b"/v1/responses/%ff%fe", "unknown_response", 404),
    (b"POST", b"/v1/responses/" + b"x" * 9000 + b"/cancel", "unknown_response", 404),
    (b"GET", b"/v1/models/other", "model_not_found", 404),
    (b"GET", b"/v1/models/%00/../tiny", "model_not_found", 404),
    (b"POST", b"/v1/embeddings", "empty_prompt", 400),
    (b"POST", b"/abort_request", "invalid_request", 400),
    (b"GET", b"/v1/messages/batches", "not_found", 404),
    (b"POST", b"/v1/messages/%00", "not_found", 404),
    (b"GET", b"/api/chat/%00", "not_found", 404),
    (b"GET", b"/api/chat", "method_not_allowed", 405),
    (b"DELETE", b"/api/delete", "invalid_request", 400),
    (b"PUT", b"/v1/streams/cmpl-0", "method_not_allowed", 405),
    (b"GET", b"/release_memory_occupation", "method_not_allowed", 405),
    (b"GET", b"/abort_request", "method_not_allowed", 405),
)


def by_id(rng: random.Random) -> Case:
    """Return a request for a stored response or for an endpoint that may not exist."""
    method, target, code, status = rng.choice(STREAM_CALLS)
    if rng.random() < 0.2:
        event = rng.choice((b"", b"a", b"cmpl-0.", b"cmpl-0.x~0", b"cmpl-0." + b"9" * 99, b"\xff"))
        body = b'{"prompt":"a","stream":true}'
        found = {(400, "invalid_event_id"), (404, "stream_not_found")}
        wanted = Wanted(frozenset(found)) if event else Wanted(last=COMPLETIONS.last)
        raw = post(COMPLETIONS.path, body, [(b"Last-Event-ID", event)])
        return Case("event id", COMPLETIONS.path, (raw,), (wanted,))
    shape: Shape = "anthropic" if target.startswith(b"/v1/messages") else "openai"
    shape = "ollama" if target.startswith(b"/api/") else shape
    refusals = refused(code, status)
    return Case("by id", "", (head(method, target),), (Wanted(refusals, shape),))


def keyed(rng: random.Random) -> Case:
    """A call that is sent again with its key, as it was or as another one."""
    interface = rng.choice(KEYED)
    key = [(b"Idempotency-Key", b"%032x" % rng.getrandbits(128))]
    again = rng.random() < 0.5
    body = usual(interface) if again else usual(interface)[:-1] + b',"priority":5}'
    reused = refusal(interface, refused("idempotency_key_reused", 422))
    sent = interface.call(usual(interface), key) + interface.call(body, key)
    wanted = (taken(interface), taken(interface) if again else reused)
    return Case("key", interface.path, tuple(cut(sent, rng)), wanted)


def pipelined(rng: random.Random) -> Case:
    """Several requests in one go, of which some are refused; the last may be no HTTP."""
    pieces, wanted = b"", []
    for _ in range(rng.randrange(2, 6)):
        interface = rng.choice((COMPLETIONS, MESSAGES))
        good = rng.random() < 0.6
        pieces += interface.call(usual(interface) if good else b"{")
        wanted.append(Wanted() if good else refusal(interface, MALFORMED))
    closed = rng.random() < 0.4
    if closed:
        pieces += rng.choice(BAD_HEADS[:6])
        wanted.append(NOT_HTTP)
    sent = (pieces,) if rng.random() < 0.5 else tuple(cut(pieces, rng))
    return Case("pipelined", "", sent, tuple(wanted), closed=closed)


def slow(rng: random.Random, interfaces: Interfaces) -> Case:
    """A head that comes byte by byte, or stops coming."""
    interface = rng.choice(interfaces)
    raw = interface.call(usual(interface))
    end = raw.index(b"\r\n\r\n") + 4
    if rng.random() < 0.5:
        first = rng.randrange(1, min(end, 60))
        drops = tuple(raw[place : place + 1] for place in range(first))
        return Case("slow head", interface.path, (*drops, raw[first:]), (taken(interface),))
    cut_at = rng.randrange(1, end - 1)
    late = Wanted(refused("request_timeout", 408))
    pieces = (raw[:cut_at],)
    return Case("no head", interface.path, pieces, (late,), closed=True, pass_s=HEAD_TIMEOUT_S)


def short_body(rng: random.Random, interfaces: Interfaces) -> Case:
    """A body that ends before its length does, since the client has nothing more."""
    interface = rng.choice(interfaces)
    raw = interface.call(usual(interface))
    end = raw.index(b"\r\n\r\n") + 4
    piece = raw[: rng.randrange(end, len(raw))]
    return Case("short body", interface.path, (piece,), (), closed=True, ends=True)
