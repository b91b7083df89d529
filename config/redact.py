"""The bus's address without what is secret in it."""

from __future__ import annotations

import re

_KINDS = ("", "+sentinel", "+cluster")

REDIS_SCHEMES = ("unix", *(f"{tls}{kind}" for tls in ("redis", "rediss") for kind in _KINDS))
"""What a Redis URL may begin with, before "://"."""


def redact(url: str) -> str:
    """A `bus.url` without any part of user, password and options, also when it is not a valid one.

    A password may hold "@", "/", "?" and "#" that were not percent-encoded. So the place is what
    follows the last "@", and where that can't be told from an option, or the beginning is not
    known, there is only "***".
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
