"""Documents in messages: files of text, as parts between tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...config import shown
from ...text.forgiving_base64 import decode_base64
from ..server.http import field_error
from .images import text_part

Part = dict[str, Any]

_MOST_HEAD = 256

_PDF = "JVBERi"
"""The beginning of a PDF, "%PDF", in base64."""


def tagged(tag: str, named: Mapping[str, str | None], inner: Sequence[Part]) -> list[Part]:
    """Return parts between tags, since templates have no field for documents.

    Args:
        named: What is said of them, each in a tag of its name unless it is empty.
    """
    lines = [f"<{name}>{value}</{name}>" for name, value in named.items() if value]
    begin, end = text_part("\n".join([f"<{tag}>", *lines])), text_part(f"</{tag}>")
    return [begin, *inner, end]


def text_in_base64(data: str, media_type: str, kind_where: str, where: str) -> str:
    """Return the text of a file in base64.

    Args:
        kind_where: The path of the media type in the body.
        where: That of the data.

    Raises:
        FieldError: It is no text in UTF-8.
    """
    if media_type.partition("/")[0].strip().lower() != "text":
        raise field_error(
            kind_where,
            f"is {shown(media_type)}, and only text is read here; send the document's text, or its "
            "pages as images",
            code="unsupported",
        )
    try:
        return decode_base64(data).decode()
    except ValueError:
        raise field_error(where, "is no UTF-8 text in base64; encode it in UTF-8") from None


def text_of_file(given: str, where: str) -> str:
    """Return the text of a file in a data URI, or in base64 alone.

    Raises:
        FieldError: It is no text in UTF-8.
    """
    if given[:5].lower() != "data:":
        kind = "application/pdf" if given.startswith(_PDF) else "text/plain"
        return text_in_base64(given, kind, where, where)
    comma = given.find(",", 0, _MOST_HEAD)
    kind, _, coding = given[5:comma].rpartition(";")
    if comma < 0 or coding.strip().lower() != "base64":
        raise field_error(where, "is no data URI with base64; write data:text/plain;base64,…")
    return text_in_base64(given[comma + 1 :], kind, where, where)
