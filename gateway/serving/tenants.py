"""Whose a request over HTTP is.

With keys, the key says so. Without, a client says so itself, or is known by its address: that keeps
clients that mean well apart, and no others, since a tenant's name can be made up.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

from starlette.requests import Request

from ...config import RequestError, shown
from ..policy.caller import caller_of
from ..policy.document import MAX_TENANT_LENGTH

HEADER = "X-Tenant"


def tenant_of(request: Request) -> str:
    """The tenant of the caller's key; where there are no keys, what the header names, else the
    address that the connection comes from.

    Raises:
        RequestError: invalid_tenant.
    """
    if known := caller_of(request).tenant:
        return known
    named = request.headers.get(HEADER)
    if named is None:
        return f"http:{_network(request.client.host)}" if request.client else "http"
    if not (0 < len(named) <= MAX_TENANT_LENGTH and named.isprintable()):
        raise RequestError(
            f"{HEADER} is {shown(named)}; it must be 1 to {MAX_TENANT_LENGTH} printable characters",
            code="invalid_tenant",
        )
    return named


def _network(host: str) -> str:
    """An address; of IPv6 the network that one client has as a rule, 64 bits of it."""
    try:
        # What stands behind % is this machine's name for the interface.
        address: IPv4Address | IPv6Address = ip_address(host.partition("%")[0])
    except ValueError:
        return host if host.isprintable() and 0 < len(host) <= 64 else "unknown"
    if isinstance(address, IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(IPv6Network((address, 64), strict=False))
