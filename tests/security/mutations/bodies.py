"""Bodies: fields changed one by one and together, and what is no JSON at all."""

from __future__ import annotations

import json
import random
from typing import Any

from nano_inference.gateway.server.http import MOST_CONTAINERS

from .interfaces import Field, Interface, Interfaces, refused
from .wire import MALFORMED, Case, Refusals, Wanted, spoiled

MAX_BODY_BYTES = 2 << 20
DEPTH = 100_000
OF_JSON = b'"\\{}[],:0e-\x00\xff\xc3'
"""Bytes that mean something in JSON, or that it can't have."""

INVALID = refused("invalid_request")
UNSUPPORTED = refused("unsupported")

NO_JSON = (
    *(b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"9" * 5000, b"-" + b"9" * 5000),
    *(b"01", b"+1", b".5", b"1.", b"0x1", b"1e", b"--1", b"tru", b"True", b"None", b"undefined"),
    *(b"'a'", b"a", b'"', b'"\\"', b'"\\u12"', b'"\\x41"', b'"\x00"', b'"\n"', b'"\x1f"'),
    *(b'"\\ud800"', b'"\\udfff"', b'"\\udc00\\ud800"', b'"\\ud800\\u0041"', b'"\\ud800x"'),
    *(b'"\xff"', b'"\xc3"', b'"\xed\xa0\x80"', b'"\xf4\x90\x80\x80"', b'"\xc0\xaf"', b"\xa0"),
    *(b"[1,]", b"[,1]", b"[1 2]", b"{1:2}", b'{"a"}', b'{"a":}', b'{"a":1,}', b"{]", b"/**/1"),
    *(b"[" * DEPTH + b"]" * DEPTH, b"[" * DEPTH, b'{"a":' * DEPTH + b"1" + b"}" * DEPTH),
    *(b'[{"a":' * (DEPTH // 2) + b"1" + b"}]" * (DEPTH // 2), b"", b" ", b",", b"}", b"]"),
)
"""None is a value of JSON in UTF-8 that a body may hold."""

NO_OBJECT = (
    *(b"[]", b"[{}]", b"1", b"true", b"null", b'"a"', b"{}{}", b"{} x", b"{", b"\x00", b"\xff"),
)


def encoded(body: Any, rng: random.Random) -> bytes:
    """A body as JSON, in one of the ways to write it."""
    separators = rng.choice(((",", ":"), (", ", ": "), (" ,\r\n", "\t:\n ")))
    text = json.dumps(body, ensure_ascii=rng.random() < 0.5, separators=separators)
    return rng.choice((b"", b"", b" ", b"\r\n\t ")) + text.encode() + rng.choice((b"", b"\n"))


def usual(interface: Interface) -> bytes:
    """The endpoint's usual body."""
    return json.dumps(interface.body).encode()


def one(kind: str, interface: Interface, body: bytes, wanted: Wanted) -> Case:
    return Case(kind, interface.path, (interface.call(body),), (wanted,))


def taken(interface: Interface, *, stream: bool | None = None, same: bool | None = True) -> Wanted:
    """The answer to a body that is taken. `stream`: None for the endpoint's default."""
    last = interface.last if (interface.streams if stream is None else stream) else ""
    return Wanted(status=interface.status, last=last, same=same)


def refusal(interface: Interface, refusals: Refusals) -> Wanted:
    return Wanted(refusals, interface.shape)


def fields_changed(rng: random.Random, interfaces: Interfaces) -> Case:
    """One to three fields of a body have other values, of which none or several can't be obeyed."""
    interface = rng.choice(interfaces)
    body = json.loads(usual(interface))
    refusals: Refusals = frozenset()
    groups: set[str] = set()
    same, stream = True, None
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        field = rng.choice(interface.fields + interface.sampling)
        within = interface.within if field in interface.sampling else ""
        own = {field.group or field.name, field.name, within and "within"} - {""}
        if groups & own or (within and "within" in groups):
            continue
        groups |= own - {"within"} if within else own
        value, found, moves = _value(field, rng)
        (body[within] if within else body)[field.name] = value
        if field.group == "within":
            groups |= {each.name for each in interface.sampling}
            groups |= {each.group for each in interface.sampling}
        refusals |= found
        same &= not moves
        stream = value if field.name == "stream" else stream
    wanted = refusal(interface, refusals)
    if not refusals:
        wanted = taken(interface, stream=stream, same=same)
    return one("fields", interface, encoded(body, rng), wanted)


def _value(field: Field, rng: random.Random) -> tuple[Any, Refusals, bool]:
    """A value, what it is refused with, and whether it changes what is asked."""
    ways: list[tuple[tuple[Any, ...], Refusals, bool]] = [
        (field.moves, frozenset(), True),
        (field.same, frozenset(), False),
        (field.wrong, INVALID, False),
        (field.outside, field.refusals or INVALID, False),
    ]
    values, refusals, moves = rng.choice([way for way in ways if way[0]])
    return rng.choice(values), refusals, moves


def other_names(rng: random.Random, interfaces: Interfaces) -> Case:
    """Fields that the endpoint does not have, or does not obey, and fields that are missing."""
    interface = rng.choice([each for each in interfaces if each.unsupported])
    body = json.loads(usual(interface))
    wanted = taken(interface)
    match rng.randrange(4):
        case 0:
            name = rng.choice(interface.unsupported)
            body[name] = rng.choice(("b", ["b"], {"b": 1}, 7))
            wanted = refusal(interface, UNSUPPORTED)
        case 1:
            body[rng.choice((*interface.neutral, "colour", "\x00", "é"))] = None
        case 2 if interface.neutral:
            body[rng.choice(interface.neutral)] = rng.choice(("b", {"b": [1]}, True))
        case 2 | 3 if rng.random() < 0.5 and interface.needed:
            name, code = rng.choice(interface.needed)
            del body[name]
            wanted = refusal(interface, refused(code))
        case _:
            name = rng.choice(("", "\x00", "é" * 9, "x" * 5000, "__class__", "\u202e", "a.b[0]"))
            body[name + rng.choice(("", "_", "1"))] = rng.choice((True, 1, "a", [None], {"": {}}))
            wanted = refusal(interface, UNSUPPORTED)
    return one("names", interface, encoded(body, rng), wanted)


def names_twice(rng: random.Random, interfaces: Interfaces) -> Case:
    """The same field more than once: the last one counts."""
    interface = rng.choice([each for each in interfaces if each.shape != "kserve"])
    name = rng.choice(sorted(interface.body))
    last = b'"%s":%s' % (name.encode(), json.dumps(interface.body[name]).encode())
    bad = b'"%s":%s' % (name.encode(), rng.choice((b"true", b"[[7.5]]")))
    inner = usual(interface)[1:-1]
    if rng.random() < 0.5:
        return one("twice", interface, b"{%s,%s,%s}" % (bad, inner, last), taken(interface))
    wanted = refusal(interface, INVALID)
    return one("twice", interface, b"{%s,%s}" % (inner, bad), wanted)


def no_json(rng: random.Random, interfaces: Interfaces) -> Case:
    """Return a body that isn't JSON, as a whole or at one position."""
    interface = rng.choice(interfaces)
    good = usual(interface)
    match rng.randrange(7):
        case 0:
            raw = good[: rng.randrange(1, len(good))]
        case 1:
            raw = rng.choice(NO_OBJECT)
        case 2:
            raw = rng.choice((b"\xef\xbb\xbf" + good, good.decode().encode("utf-16")))
        case 3:
            raw = good + rng.choice((b"}", b",", b"x", b"{}", b"\x00", b"\xff", b"//"))
        case 4:
            raw = rng.randbytes(rng.randrange(1, 300))
        case 5:
            raw = spoiled(good, rng, OF_JSON)
        case _:
            raw = b'{"x":%s,' % rng.choice(NO_JSON) + good[1:]
    if reads_as_object(raw):
        raw += b"]"
    return one("no JSON", interface, raw, refusal(interface, MALFORMED))


def reads_as_object(raw: bytes) -> bool:
    """Whether a strict reader finds an object of JSON, or nothing at all."""

    def refuse(word: str) -> Any:
        raise ValueError(word)

    try:
        text = raw.decode()
        found = json.loads(text, parse_constant=refuse) if text.strip(" \t\r\n") else {}
        json.dumps(found, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict)


def too_much(rng: random.Random, interfaces: Interfaces) -> Case:
    """More bytes than a body may have, or more lists."""
    interface = rng.choice(interfaces)
    good = usual(interface)
    raw = good + b" " * (MAX_BODY_BYTES + 1 - len(good))
    if rng.random() < 0.5:
        raw = b'{"x":[' + rng.choice((b"[],", b"{},")) * MOST_CONTAINERS + b"1]," + good[1:]
    return one("too much", interface, raw, refusal(interface, refused("request_too_large", 413)))
