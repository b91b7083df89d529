"""The bus's address without secrets."""

from __future__ import annotations

import re

_KINDS = ("", "+sentinel", "+cluster")

REDIS_SCHEMES = ("unix", *(f"{tls}{kind}" for tls in ("redis", "rediss") for kind in _KINDS))
"""Schemes of Redis URLs."""


def redact(url: str) -> str:
    """Return `bus.url` without user, password and options, even if it is invalid.

    A password may contain unescaped "@", "/", "?" and "#". So the host is the part after the last
    "@"; if that may be an option, or the scheme is unknown, the result is "***".
    """
    if url == "memory":
        return url
    scheme, _, rest = url.partition("://")
    if scheme not in REDIS_SCHEMES:
        return "***"
    place, *more = re.split("[?#]", rest, maxsplit=1)
    if any("@" in text or "password" in text for text in more):
        return f"{scheme}://***"
    return f"{scheme}://{place.rpartition('@')[2]}"
