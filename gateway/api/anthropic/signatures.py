"""Signatures of thinking blocks, which clients send back unread.

Some clients, such as LiteLLM, drop blocks without one. That of an omitted text holds the text, so
that the model reads its thinking again in the next turn, and its prompt begins with what it wrote.
That of a shown text has its length and digest: LiteLLM puts a streamed text together twice. Any
other signature, such as another tenant's, and that of a changed text, is ignored.
"""

from __future__ import annotations

import hashlib

from ...serving.sealed import seal, unseal
from .bodies import ThinkingBlock

_OMITTED, _SHOWN = "thinking", "shown_thinking"


def signature_of(text: str, tenant: str, *, omitted: bool) -> str:
    """Return the signature of a block. `omitted`: whether its text is not in the block."""
    if omitted:
        return seal(_OMITTED, tenant, text)
    return seal(_SHOWN, tenant, f"{len(text)}:{_digest(text)}")


def thinking_of(block: ThinkingBlock, tenant: str) -> str:
    """Return the text of a block as the model wrote it, or as the client changed it."""
    text, signature = block.thinking, block.signature
    if not text:
        return unseal(_OMITTED, tenant, signature) or ""
    length, _, digest = (unseal(_SHOWN, tenant, signature) or "").partition(":")
    # A client can make a seal itself.
    if not (length.isascii() and length.isdecimal()):
        return text
    first = text[: int(length[:9])]
    return first if _digest(first) == digest else text


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
