"""How many fields a message has, found before it is decoded: of tiny ones protobuf makes objects of
twenty times their size, and takes seconds for as many as there may be in one message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

from ....config import RequestError
from ....kserve.protobuf import Method, ModelInferRequest

MOST_FIELDS = 16_384
"""Of a request, with those of its tensors and parameters: a dozen for each tensor it may have."""

MOST_BYTES = 1 << 16
"""Of a message that has no tensors."""

# Of ModelInferRequest, what is made of fields itself: parameters, inputs and outputs.
_PARTS = (4, 5, 6)


class _NoFields(ValueError):
    """It is no message, which decoding it finds out as well."""


def check_fields(method: Method, data: bytes) -> None:
    """Looks at a message before it is decoded. What is none passes, since decoding it tells why.

    Raises:
        RequestError: request_too_large.
    """
    if method.request is not ModelInferRequest:
        if len(data) > MOST_BYTES:
            raise _too_large(f"has more than {MOST_BYTES} bytes and no tensors")
        return
    # The smallest has two bytes.
    if len(data) > 2 * MOST_FIELDS and _count(data) > MOST_FIELDS:
        raise _too_large(f"has more than {MOST_FIELDS} tensors, parameters and fields of these")


def _count(data: bytes) -> int:
    """The fields of a message and of its parts; one more than are allowed where there are more."""
    number = 0
    with suppress(_NoFields):
        for field, begin, end in _fields(data, 0, len(data)):
            number += 1
            inner = _fields(data, begin, end) if field in _PARTS else ()
            number += sum(1 for _ in islice(inner, MOST_FIELDS))
            if number > MOST_FIELDS:
                break
    return number


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The number of each field, and where its bytes begin and end. Raises _NoFields."""
    while at < end:
        tag, begin = _varint(data, at)
        match tag & 7:
            case 0:
                _, at = _varint(data, begin)
            case 1:
                at = begin + 8
            case 5:
                at = begin + 4
            case 2:
                length, begin = _varint(data, begin)
                at = begin + length
            case _:
                # Groups, which decoding skips: what is behind them would not be looked at.
                raise RequestError(
                    "the message has groups; make it of the service's inference.proto",
                    code="malformed",
                )
        yield tag >> 3, begin, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = shift = 0
    for place, byte in enumerate(data[at : at + 10], at + 1):
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
    raise _NoFields


def _too_large(what: str) -> RequestError:
    return RequestError(f"the message {what}; send less at a time", code="request_too_large")
