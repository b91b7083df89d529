"""Signatures of thinking blocks, which clients send back unread.

That of an omitted text holds the text, so that the model reads its thinking again in the next turn,
and its prompt begins with what it wrote. Any other signature is ignored.
"""

from __future__ import annotations

import base64

from .bodies import ThinkingBlock

_MARK = "nano-thinking:"


def signature_of(omitted: str) -> str:
    """Return the signature for an omitted text; "" for no text."""
    return _MARK + base64.b64encode(omitted.encode()).decode() if omitted else ""


def thinking_of(block: ThinkingBlock) -> str:
    """Return the text of a block, or the omitted one from its signature."""
    if block.thinking or not block.signature.startswith(_MARK):
        return block.thinking
    try:
        return base64.b64decode(block.signature[len(_MARK) :], validate=True).decode()
    except ValueError:  # also of bytes that are no text
        return ""
