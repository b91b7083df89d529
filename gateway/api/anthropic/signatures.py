"""Signatures of thinking blocks, which clients send back unread.

Some clients, such as LiteLLM, drop blocks without one. That of an omitted text holds the text, so
that the model reads its thinking again in the next turn, and its prompt begins with what it wrote.
That of a shown text has its length and digest: LiteLLM puts a streamed text together twice. Any
other signature, and that of a changed text, is ignored.
"""

from __future__ import annotations

import base64
import hashlib

from .bodies import ThinkingBlock

_OMITTED = "nano-omitted:"
_SHOWN = "nano-shown:"


def signature_of(text: str, *, omitted: bool) -> str:
    """Return the signature of a block. `omitted`: whether its text is not in the block."""
    if omitted:
        return _OMITTED + base64.b64encode(text.encode()).decode()
    return f"{_SHOWN}{len(text)}:{_digest(text)}"


def thinking_of(block: ThinkingBlock) -> str:
    """Return the text of a block as the model wrote it, or as the client changed it."""
    text, signature = block.thinking, block.signature
    if signature.startswith(_OMITTED) and not text:
        try:
            return base64.b64decode(signature[len(_OMITTED) :], validate=True).decode()
        except ValueError:  # also of bytes that are no text
            return ""
    length, _, digest = signature.removeprefix(_SHOWN).partition(":")
    if signature.startswith(_SHOWN) and length.isascii() and length.isdecimal():
        first = text[: int(length[:9])]
        return first if _digest(first) == digest else text
    return text


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
