"""Quotes of foreign text stay short."""

from __future__ import annotations

import msgspec

from nano_inference.config import (
    MOST_SHOWN,
    MOST_TEXT,
    RequestError,
    cut,
    line_safe,
    shown,
)


def test_a_value_is_shown_short_and_in_ascii() -> None:
    assert shown("naïve") == r"'na\xefve'"
    assert shown("\ud800") == r"'\ud800'"
    assert len(shown("x" * 1_000_000)) == MOST_SHOWN
    assert len(shown(b"\xff" * 1_000_000)) == MOST_SHOWN
    assert shown(1 << 40_000) == "an integer of 40001 bits"


def test_an_error_keeps_the_beginning_of_a_long_message() -> None:
    error = RequestError("no model " + "x" * 1_200_000)
    assert len(error.message) == MOST_TEXT
    assert error.message.startswith("no model xxx")
    assert error.message.endswith("...")
    assert str(error) == error.message


def test_a_message_that_fits_is_not_touched() -> None:
    assert cut("a" * MOST_TEXT) == "a" * MOST_TEXT


def test_json_is_one_line_for_readers_of_unicode_lines() -> None:
    ends = [chr(n) for n in range(0x110000) if len(f"a{chr(n)}b".splitlines()) > 1]
    assert {"\x85", "\u2028", "\u2029"} < {*ends}
    value = {"text": "a".join(ends), "é\u2028": ["\u2027\u202a\x84\xc5"]}
    encoded = line_safe(msgspec.json.encode(value))
    assert len(encoded.decode().splitlines()) == 1
    assert msgspec.json.decode(encoded) == value
    assert line_safe("é\u2027\x84".encode()) == "é\u2027\x84".encode()
