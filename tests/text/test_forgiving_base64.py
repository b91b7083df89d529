"""Base64 is read by WHATWG's forgiving rule."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.text.forgiving_base64 import decode_base64


@given(st.binary(max_size=200), st.integers(1, 80), st.sampled_from(["\n", "\r\n", " ", "\t\f"]))
def test_lines_of_any_length_and_no_padding_are_the_same(
    data: bytes, length: int, end: str
) -> None:
    text = base64.b64encode(data).decode()
    lines = end.join(text[at : at + length] for at in range(0, len(text), length))
    for written in (text, lines, text.rstrip("="), lines.replace("=", ""), lines.encode() + b"\n"):
        assert decode_base64(written) == data


@pytest.mark.parametrize(
    "text", ["A", "AA=", "AAA==", "A===", "====", "=AAA", "A=AA", "AA==AAAA", "AA-_", "AÄAA", "\0"]
)
def test_other_texts_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="no base64"):
        decode_base64(text)
