"""How what came from outside is quoted: short, and in characters that every reader can take.

Whatever quotes a name, a value or an error's text in a message goes through here. So nothing that a
client sends can make a message, a log line or an answer of any size but ours.
"""

from __future__ import annotations

import re

MOST_SHOWN = 80
"""Characters of one value."""

MOST_TEXT = 2000
"""Characters of a whole message; a sentence of ours with some values in it has fewer."""

# The name ends before msgspec's place, or with the text. It may itself hold what looks like one.
_UNKNOWN_FIELD = re.compile(
    r"unknown field `(.*?)`(?= - at `\$[\w.\[\]]{0,200}`\Z|\Z)", re.DOTALL | re.ASCII
)


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


def field_name(name: str) -> str:
    """A field's name as it is when it may be that of somebody's field, else cut and quoted."""
    return name if name.isascii() and name.isidentifier() and len(name) <= 80 else shown(name)


def told_of(error: Exception) -> str:
    """What msgspec says of a value that is not of its type, in which the name of a field that there
    is not, which may be any text, stands as `field_name` has it."""
    return _UNKNOWN_FIELD.sub(lambda name: f"unknown field `{field_name(name[1])}`", str(error))


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
