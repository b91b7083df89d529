"""How what came from outside is quoted: short, and in characters that every reader can take.

Whatever quotes a name, a value or an error's text in a message goes through here. So nothing that a
client sends can make a message, a log line or an answer of any size but ours.
"""

from __future__ import annotations

MOST_SHOWN = 80
"""Characters of one value."""

MOST_TEXT = 2000
"""Characters of a whole message; a sentence of ours with some values in it has fewer."""


def shown(value: object) -> str:
    """A value as it can stand in any message: at most `MOST_SHOWN` characters, and ASCII.

    Python refuses to print integers of thousands of digits, text may hold lone surrogates, which no
    codec takes, and what is long is not written out in full to be cut afterwards.
    """
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str | bytes):
        value = value[: MOST_SHOWN + 1]
    return cut(ascii(value), MOST_SHOWN)


def cut(text: str, most: int = MOST_TEXT) -> str:
    """A text of at most `most` characters, of which the last three say that it went on."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def cut_middle(text: str, most: int = MOST_TEXT) -> str:
    """The same, of which a quarter is the text's end: where something is, or what a traceback is
    about."""
    if len(text) <= most:
        return text
    end = most // 4
    return f"{text[: most - 3 - end]}...{text[len(text) - end :]}"
