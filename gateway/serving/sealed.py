"""Texts that clients keep for us: reasoning and summaries of responses, thinking of messages.

A text is compressed and marked with its kind and its tenant, so that another tenant's, another
server's or a damaged one is not taken for ours. It is no secret: its client has seen all of it.
"""

from __future__ import annotations

import base64
import hashlib
import zlib

import msgspec

_PREFIX = "ni1."
_MOST_CHARS = 1 << 22
"""Longest text in bytes, so that a small one can't take much memory."""


class _Sealed(msgspec.Struct, frozen=True, array_like=True):
    kind: str
    tenant: str
    text: str


def seal(kind: str, tenant: str, text: str) -> str:
    """Return a text as an opaque one."""
    sealed = msgspec.json.encode(_Sealed(kind, _digest(tenant), text))
    return _PREFIX + base64.urlsafe_b64encode(zlib.compress(sealed)).decode()


def unseal(kind: str, tenant: str, sealed: str) -> str | None:
    """Return the text of an opaque one; None if it was not made for this kind and tenant."""
    if not sealed.startswith(_PREFIX):
        return None
    try:
        packed = base64.urlsafe_b64decode(sealed.removeprefix(_PREFIX))
        unpacker = zlib.decompressobj()
        found = msgspec.json.decode(unpacker.decompress(packed, _MOST_CHARS), type=_Sealed)
    # Errors of base64, zlib and msgspec.
    except (ValueError, zlib.error):
        return None
    if not unpacker.eof or (found.kind, found.tenant) != (kind, _digest(tenant)):
        return None
    return found.text


def _digest(tenant: str) -> str:
    return hashlib.sha256(tenant.encode()).hexdigest()[:32]
