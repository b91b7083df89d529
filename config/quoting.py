"""Quoting of outside input in messages: short, and in characters that every reader accepts.

Every name, value and error text that is quoted goes through here, so that no client can make a
message, log line or answer of unbounded size.
"""

from __future__ import annotations

MOST_SHOWN = 80
"""Limit on characters of one value."""

MOST_TEXT = 2000
"""Limit on characters of a whole message."""

_LINE_ENDS = tuple((chr(end).encode(), b"\\u%04x" % end) for end in (0x85, 0x2028, 0x2029))


def line_safe(encoded: bytes) -> bytes:
    """Escape the line ends of Unicode in JSON: U+0085, U+2028 and U+2029.

    JSON need not escape them, and readers of lines that follow Unicode, such as Python's
    `str.splitlines` and HTTPX's `iter_lines`, would cut the text there.
    """
    if encoded.isascii():
        return encoded
    for raw, escaped in _LINE_ENDS:
        # The search for one byte is many times faster.
        if raw[-1] in encoded:
            encoded = encoded.replace(raw, escaped)
    return encoded


def shown(value: object) -> str:
    """Quote a value: ASCII, at most `MOST_SHOWN` characters.

    Python refuses to print integers of thousands of digits, text may hold lone surrogates, and a
    long value is cut before it is formatted.
    """
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str | bytes):
        value = value[: MOST_SHOWN + 1]
    try:
        return cut(ascii(value), MOST_SHOWN)
    except ValueError:
        return "a value with an integer of thousands of digits"


def is_unicode(text: str) -> bool:
    """Return whether a text has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def field_name(name: str) -> str:
    """Return a plausible field name unchanged, any other cut and quoted."""
    return name if name.isascii() and name.isidentifier() and len(name) <= 80 else shown(name)


def cut(text: str, most: int = MOST_TEXT) -> str:
    """Cut a text to `most` characters, the last three of which show the cut."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def cut_middle(text: str, most: int = MOST_TEXT) -> str:
    """Cut a text in the middle; a quarter of the result is the text's end, such as an error's
    position."""
    if len(text) <= most:
        return text
    end = most // 4
    return f"{text[: most - 3 - end]}...{text[len(text) - end :]}"
