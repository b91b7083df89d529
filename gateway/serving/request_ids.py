"""Ids of requests: the names that clients give, the ids on the bus, and the tags of calls."""

from __future__ import annotations

import hashlib
import uuid
from contextvars import ContextVar

import msgspec

from ...config import RequestError, shown
from ..call import Call
from ..caller import Caller

TAG_HEADER = "X-Request-Tag"
"""A name for any number of calls, whose results are followed together; docs/results.md."""

MOST_TAG = 128
"""Characters of a tag."""

_MARK: ContextVar[str] = ContextVar("_MARK", default="")
_MAY_BE_NAMED: ContextVar[bool] = ContextVar("_MAY_BE_NAMED", default=True)


def set_tag(call: Call) -> None:
    """Set the tag of the ids that are made from now on in this task.

    Raises:
        RequestError: invalid_tag, invalid_tenant.
    """
    tag = call.header(TAG_HEADER)
    _MARK.set("" if tag is None else mark_of(call.tenant, tag))
    # A line of a batch has the batch's tag, and perhaps a name of its own.
    _MAY_BE_NAMED.set(tag is None or call.batch_line)


def mark_of(tenant: str, tag: str) -> str:
    """Return the digits that a tag puts into the ids of a tenant's requests.

    Raises:
        RequestError: invalid_tag.
    """
    if not (0 < len(tag) <= MOST_TAG and tag.isprintable()):
        raise RequestError(
            f"the tag is {shown(tag)}; it must be 1 to {MOST_TAG} printable characters",
            code="invalid_tag",
        )
    return hashlib.blake2b(msgspec.json.encode((tenant, tag)), digest_size=16).hexdigest()


def new_id(prefix: str = "") -> str:
    """Return a random id, after the prefix and the mark of the call's tag, if it has one."""
    return f"{prefix}{_MARK.get()}{uuid.uuid4().hex}"


def named(name: str | None, field: str) -> str:
    """Return a request's name by its field in the body, or a new id without one.

    Raises:
        RequestError: invalid_tag.
    """
    if not name:
        return new_id()
    check_untagged(field)
    return name


def check_untagged(field: str) -> None:
    """Raises RequestError: invalid_tag: a call with a tag names its request itself."""
    if not _MAY_BE_NAMED.get():
        raise RequestError(
            f"{TAG_HEADER} puts a tag into ids that the gateway makes, and {field} names the "
            "request; leave out one, and follow named requests by their prefix",
            code="invalid_tag",
        )


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
