"""Messages of protobuf with other fields than they had, which can be read all the same."""

from __future__ import annotations

import random
from typing import NamedTuple

EXTREMES = (0, 1, 2, 127, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
MOST_BYTES = 1 << 18
"""That a field is made of that is there many times."""

_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5


class Field(NamedTuple):
    """One of a message; `value` is a number where `kind` is that of one."""

    number: int
    kind: int
    value: int | bytes


def rewired(raw: bytes, rng: random.Random) -> bytes:
    """A message of which one field, or a field of one of its fields, is another."""
    fields = _read(raw)
    if not fields:
        return _written([Field(rng.randrange(1, 9), _BYTES, rng.randbytes(rng.randrange(9)))])
    place = rng.randrange(len(fields))
    number, kind, value = fields[place]
    match rng.randrange(12):
        case 0:
            del fields[place]
        case 1:
            fields.insert(rng.randrange(len(fields) + 1), fields[place])
        case 2:
            fields[place] = Field(rng.randrange(1, 10), kind, value)
        case 3:
            fields[place] = Field(number, _VARINT, rng.choice(EXTREMES))
        case 4:
            fields.append(Field(rng.randrange(1, 10), _BYTES, rng.randbytes(rng.randrange(40))))
        case 5:
            more = rng.choice((2, 40, 2000))
            fields[place:place] = [fields[place]] * min(more, 2 + MOST_BYTES // (1 + len(raw)))
        case _:
            fields[place] = Field(number, kind, _other(value, rng))
    return _written(fields)


def _other(value: int | bytes, rng: random.Random) -> int | bytes:
    if isinstance(value, int):
        return rng.choice((value + 1, value ^ 1, *EXTREMES))
    if value and _read(value) and rng.random() < 0.8:
        return rewired(value, rng)
    place = rng.randrange(len(value) + 1)
    more = rng.choice((b"", b"\x00", b"\xff" * 4, b"x" * 300, rng.randbytes(5)))
    return value[:place] + more + value[place + rng.randrange(3) :]


def _read(raw: bytes) -> list[Field]:
    """The fields of a message; none where it is none."""
    fields, place = [], 0
    while place < len(raw):
        tag, place = _number(raw, place)
        kind, value = tag & 7, b""
        if tag < 8 or place > len(raw):
            return []
        if kind == _VARINT:
            found, place = _number(raw, place)
            fields.append(Field(tag >> 3, kind, found))
            continue
        if kind not in (_EIGHT, _BYTES, _FOUR):
            return []
        size = {_EIGHT: 8, _FOUR: 4}.get(kind, 0)
        if kind == _BYTES:
            size, place = _number(raw, place)
        value, place = raw[place : place + size], place + size
        fields.append(Field(tag >> 3, kind, value))
    return fields if place == len(raw) else []


def _number(raw: bytes, place: int) -> tuple[int, int]:
    """One of variable length, and the place behind it, which is far away where there is none."""
    found = 0
    for count, byte in enumerate(raw[place : place + 10]):
        found |= (byte & 127) << 7 * count
        if byte < 128:
            return found, place + count + 1
    return 0, len(raw) + 1


def _written(fields: list[Field]) -> bytes:
    made = bytearray()
    for number, kind, value in fields:
        made += _varint(number << 3 | kind)
        if isinstance(value, int):
            made += _varint(value % 2**64)
        else:
            made += (_varint(len(value)) if kind == _BYTES else b"") + value
    return bytes(made)


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    return bytes([*made, number])
