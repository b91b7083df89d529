"""Messages of protobuf with other fields than they had, which can be read all the same."""

from __future__ import annotations

import random
import struct
from typing import NamedTuple

from google.protobuf.empty_pb2 import Empty
from google.protobuf.internal.encoder import TagBytes, _VarintBytes
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

EXTREMES = (0, 1, 2, 127, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
MOST_BYTES = 1 << 18
"""That a field is made of that is there many times."""

_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5


class Field(NamedTuple):
    """A field of a message; `value` is bytes if `kind` is `_BYTES`, else a number."""

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
    """The fields of a message; empty for bytes that are no message, or that have a group."""
    try:
        found = UnknownFieldSet(Empty.FromString(raw))
    except DecodeError:
        return []
    fields = [Field(each.field_number, each.wire_type, each.data) for each in found]
    known = all(field.kind in (_VARINT, _EIGHT, _BYTES, _FOUR) for field in fields)
    return fields if known else []


def _written(fields: list[Field]) -> bytes:
    made = bytearray()
    for number, kind, value in fields:
        made += TagBytes(number, kind)
        if isinstance(value, bytes):
            made += _VarintBytes(len(value)) + value
        elif kind == _VARINT:
            made += _VarintBytes(value % 2**64)
        else:
            made += struct.pack("<Q", value % 2**64)[: 8 if kind == _EIGHT else 4]
    return bytes(made)
