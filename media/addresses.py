"""URLs and addresses that the gateway may connect to for a client: protection from server-side
request forgery.

A URL comes from outside, and this machine reaches what its sender can't: its own ports, the private
network, and a cloud's metadata service.
"""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple
from urllib.parse import SplitResult, urljoin, urlsplit

from ..config import ImagesConfig, RequestError, shown

MOST_CHARACTERS = 8192
"""Length limit of a URL."""

_DEFAULT_PORTS = {"http": 80, "https": 443}
_PLAIN = re.compile(r"[!-~]+")
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        (
            # Azure's agent of each virtual machine, although the address is public, and Oracle's
            # metadata.
            *("168.63.129.16/32", "192.0.0.0/24"),
            # Addresses that stand for an IPv4 address: mapped, compatible, NAT64, 6to4, Teredo.
            *("::ffff:0:0/96", "::/96", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32"),
            # The relays of 6to4, and site-local addresses.
            *("192.88.99.0/24", "fec0::/10"),
        ),
    )
)
"""Networks that are refused besides those that the standard library lists as special."""

_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")


class UrlRules(NamedTuple):
    """The URLs that are allowed for one purpose, and the words of its errors.

    Attributes:
        setting: The settings' names without `_hosts`, `_networks` and `_ports`.
        instead: The remedy of a refused URL.
        off: Code of the error where no host is allowed.
        invalid: Code of the error of a URL that can't be used.
        refused: Code of the error of a host that is not allowed.
    """

    hosts: tuple[str, ...]
    networks: tuple[str, ...]
    ports: tuple[int, ...]
    setting: str
    instead: str
    off: str
    invalid: str
    refused: str


def image_rules(config: ImagesConfig) -> UrlRules:
    """Return the rules of images by URL."""
    return UrlRules(
        config.url_hosts,
        config.url_networks,
        config.url_ports,
        setting="images.url",
        instead="send the image itself, as base64",
        off="image_urls_off",
        invalid="invalid_image_url",
        refused="image_host_refused",
    )


class Target(NamedTuple):
    """A checked URL.

    Attributes:
        host: A name in lower case, or an address without brackets.
        path: With the query.
    """

    scheme: str
    host: str
    port: int
    path: str

    @property
    def url(self) -> str:
        """The URL, as the base of redirects."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"


def check_url(url: str, rules: UrlRules, where: str) -> Target:
    """Check a URL before its host is looked up.

    Args:
        where: The URL's place in a request, for errors.

    Raises:
        RequestError: The URL is not allowed.
    """
    if not rules.hosts:
        raise RequestError(
            f"{where}: no URLs are fetched here ({rules.setting}_hosts); {rules.instead}",
            code=rules.off,
        )
    if len(url) > MOST_CHARACTERS:
        raise _invalid(rules, where, f"it has more than {MOST_CHARACTERS} characters")
    if not _PLAIN.fullmatch(url) or "\\" in url:
        raise _invalid(rules, where, "it may hold printable ASCII only; percent-encode the rest")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise _invalid(rules, where, "it can't be read") from None
    if parts.scheme not in _DEFAULT_PORTS:
        raise _invalid(rules, where, f"its scheme is {shown(parts.scheme)}; use http or https")
    if "@" in parts.netloc:
        raise _invalid(rules, where, "it holds credentials; leave them out")
    host = _host_of(parts, rules, where)
    port = _DEFAULT_PORTS[parts.scheme] if port is None else port
    if port not in rules.ports:
        ports = ", ".join(map(str, rules.ports))
        reason = f"its port is {port}; allowed are {ports} ({rules.setting}_ports)"
        raise _invalid(rules, where, reason)
    if not _is_listed(host, rules.hosts):
        raise RequestError(
            f"{where}: it is not fetched from {shown(host)} ({rules.setting}_hosts); "
            f"{rules.instead}",
            code=rules.refused,
        )
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.scheme, host, port, path)


def redirected(target: Target, location: str, rules: UrlRules, where: str) -> Target:
    """Check a redirect as `check_url` does; one from https to http is refused as well."""
    try:
        url = urljoin(target.url, location)
    except ValueError:
        raise _invalid(rules, where, "its redirect can't be read") from None
    found = check_url(url, rules, where)
    if target.scheme == "https" and found.scheme == "http":
        raise _invalid(rules, where, "it redirects from https to http")
    return found


def check_addresses(host: str, addresses: list[str], rules: UrlRules, where: str) -> list[Address]:
    """Check all addresses of a host; one that isn't public refuses the host.

    A name with several addresses, of which the client chooses one, would otherwise get through by
    luck. No error says which address a name has here.

    Raises:
        RequestError: The host is not allowed.
    """
    networks = tuple(map(ipaddress.ip_network, rules.networks))
    found = [ipaddress.ip_address(address.partition("%")[0]) for address in addresses]
    scoped = any("%" in address for address in addresses)
    if (
        scoped
        or not found
        or not all(
            is_public(each) or any(each in network for network in networks) for each in found
        )
    ):
        raise RequestError(
            f"{where}: {shown(host)} has no public address, or others besides "
            f"({rules.setting}_networks); {rules.instead}",
            code=rules.refused,
        )
    return found


def is_public(address: Address) -> bool:
    """Return whether an address belongs to a host of the public internet."""
    if any(address in network for network in _NOT_PUBLIC):
        return False
    if isinstance(address, ipaddress.IPv6Address) and address not in _GLOBAL_UNICAST:
        return False
    return address.is_global and not address.is_multicast


def _host_of(parts: SplitResult, rules: UrlRules, where: str) -> str:
    """Return a URL's host in its one normal form.

    Raises:
        RequestError: The host is neither a name nor an address in full.
    """
    host = (parts.hostname or "").removesuffix(".")
    if "[" in parts.netloc or ":" in host:
        try:
            # A zone ("%eth0") names an interface of this machine.
            return str(ipaddress.IPv6Address("" if "%" in host else host))
        except ValueError:
            raise _invalid(rules, where, f"{shown(host)} is no IPv6 address") from None
    if _NUMBER.fullmatch(host.rpartition(".")[2]):
        # Resolvers take 127.1, 0177.0.0.1, 2130706433 and 0x7f000001 for 127.0.0.1.
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError:
            raise _invalid(
                rules, where, f"{shown(host)} is no IPv4 address of four decimal numbers"
            ) from None
    if not _NAME.fullmatch(host) or len(host) > 253:
        raise _invalid(rules, where, f"{shown(host)} is no name of a host")
    return host


def _is_listed(host: str, hosts: tuple[str, ...]) -> bool:
    """Return whether the allow list has a host."""
    bracketed = f"[{host}]" if ":" in host else host
    return any(
        entry in ("*", bracketed) or (entry.startswith("*.") and host.endswith(entry[1:]))
        for entry in hosts
    )


def _invalid(rules: UrlRules, where: str, reason: str) -> RequestError:
    return RequestError(
        f"{where}: the URL can't be used: {reason}, or {rules.instead}", code=rules.invalid
    )
