"""The identity of an entry of the requests queue."""

from __future__ import annotations

from functools import lru_cache

MAX_REQUEST_ID_LENGTH = 512
"""Characters; a gateway with keys puts the tenant before the client's id."""


def is_usable_request_id(request_id: str) -> bool:
    """Return whether an id is printable and short enough for a result stream and logs."""
    return 0 < len(request_id) <= MAX_REQUEST_ID_LENGTH and request_id.isprintable()


@lru_cache(maxsize=1024)
def entry_key(entry_id: str, request_id: str) -> str:
    """Return the identity of an entry: its id and, if it has one of its own, its request's.

    The entry's id is not enough: after a failover, or when its clock goes back, a server gives the
    id of an entry that it has lost to another one. Cached, as each request's is read a dozen
    times.
    """
    if request_id == entry_id or not is_usable_request_id(request_id):
        return entry_id
    return f"{entry_id} {request_id}"
