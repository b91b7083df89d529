"""Ids of requests: the names that clients give, and the ids on the bus."""

from __future__ import annotations

from ..caller import Caller


def bus_id(caller: Caller, name: str) -> str:
    """Return the id on the bus of a request that a caller has named.

    The id of an authenticated tenant's request is `TENANT/NAME`, so that no other tenant can take,
    end or read it. In the tenant `~` is written as `~0`, and `/` as `~1`. Without authentication
    the id is the name.
    """
    return f"{_beginning(caller)}{name}"


def name_of(caller: Caller, request_id: str) -> str:
    """Return the name that a caller's request has for its client."""
    return request_id.removeprefix(_beginning(caller))


def ids_of(caller: Caller, name: str) -> tuple[str, ...]:
    """Return the ids on the bus that a caller may mean: of its own request of this name first, and
    of the request that has the id itself."""
    return tuple(dict.fromkeys((bus_id(caller, name), name)))


def concerns(call_id: str, request_id: str) -> bool:
    """Return whether an id is that of a request or of its call."""
    return request_id == call_id or request_id.startswith(f"{call_id}_")


def _beginning(caller: Caller) -> str:
    tenant = caller.tenant.replace("~", "~0").replace("/", "~1")
    return f"{tenant}/" if tenant else ""
