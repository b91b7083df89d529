"""Parsing of `bus.url`: a single server, sentinels, or nodes of a cluster.

redis://[user:password@]host:port[/db]                                  (rediss:// with TLS)
unix:///path
redis+sentinel://[user:password@]host:port[,host:port...]/service[/db]  (rediss+sentinel://)
redis+cluster://[user:password@]host:port[,host:port...]                (rediss+cluster://)

Options of redis-py may follow, as `?health_check_interval=10`. User and password are those of the
servers; for sentinels, add `?sentinel_username=…&sentinel_password=…`. A redis:// URL of 127.0.0.1
without either gets the password of `up`'s embedded server at its port.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from redis.asyncio.connection import Connection, SSLConnection, parse_url

from .embedded import HOST, EmbeddedPassword

SENTINEL_PORT = 26379
SERVER_PORT = CLUSTER_PORT = 6379

CREDENTIALS = frozenset(("username", "password"))
"""Options that hold the user's own credentials."""

Kind = Literal["server", "sentinel", "cluster"]


class Address(NamedTuple):
    """Connection parameters.

    Attributes:
        kind: Kind of the server's address.
        connection_class: With or without TLS.
        options: Arguments for connections to servers, with host and port for a single server.
        nodes: Sentinels, or the cluster's seed nodes.
        service: The master's name among the sentinels.
        sentinel_options: Arguments for connections to sentinels.
    """

    kind: Kind
    connection_class: type[Connection]
    options: dict[str, Any]
    nodes: tuple[tuple[str, int], ...] = ()
    service: str = ""
    sentinel_options: dict[str, Any] = {}  # noqa: RUF012  (never changed)

    @property
    def tls(self) -> bool:
        return issubclass(self.connection_class, SSLConnection)


def parse_address(url: str) -> Address:
    """Parse `bus.url`.

    Raises:
        ValueError: It is not valid. The text may quote a part of the password.
    """
    scheme, _, rest = url.partition("://")
    _check_meaning(scheme, rest)
    plain, _, kind = scheme.partition("+")
    if plain in ("redis", "rediss") and not (kind or _is_database(urlsplit(f"//{rest}").path)):
        raise ValueError("the path is no database's number")
    if kind not in ("sentinel", "cluster"):
        connection_class, options = _options(url)
        if scheme == "redis" and options.get("host") == HOST and CREDENTIALS.isdisjoint(options):
            options["credential_provider"] = EmbeddedPassword(options.get("port", SERVER_PORT))
        return Address("server", connection_class, options)
    parts = urlsplit(f"//{rest}")
    credentials, at, hosts = parts.netloc.rpartition("@")
    nodes = _nodes(hosts, SENTINEL_PORT if kind == "sentinel" else CLUSTER_PORT)
    path = [unquote(part) for part in parts.path.split("/") if part]
    query = parts.query
    service, sentinel_options = "", {}
    if kind == "sentinel":
        if not path:
            raise ValueError("the path has to name the service")
        service = path.pop(0)
        given = parse_qs(query)
        for name in ("username", "password"):
            if f"sentinel_{name}" in given:
                sentinel_options[name] = given[f"sentinel_{name}"][0]
        query = "&".join(
            option for option in query.split("&") if option and not option.startswith("sentinel_")
        )
    if len(path) > (kind == "sentinel"):
        raise ValueError("the path is too long")
    server = f"{plain}://{credentials}{at}host/{'/'.join(path)}"
    connection_class, options = _options(f"{server}?{query}" if query else server)
    del options["host"]
    return Address(
        "sentinel" if kind == "sentinel" else "cluster",
        *(connection_class, options, nodes, service, sentinel_options),
    )


def _check_meaning(scheme: str, rest: str) -> None:
    """Refuse a URL that may contain a password with an unescaped "/", "?" or "#"."""
    parts = urlsplit(f"//{rest}")
    options = parts.query.split("&") if parts.query else []
    if "@" in parts.fragment or any("@" in option.partition("=")[0] for option in options):
        raise ValueError("an @ is not percent-encoded")
    if "@" in parts.path and (scheme != "unix" or parts.netloc):
        raise ValueError("an @ in the path is not percent-encoded")


def _is_database(path: str) -> bool:
    """Return whether a path is a database's number, or none. redis-py takes any other as 0."""
    number = path.strip("/")
    return not number or number.isdecimal()


def _options(url: str) -> tuple[type[Connection], dict[str, Any]]:
    options: dict[str, Any] = dict(parse_url(url))
    connection_class: type[Connection] = options.pop("connection_class", Connection)
    return connection_class, options


def _nodes(hosts: str, default_port: int) -> tuple[tuple[str, int], ...]:
    nodes = []
    for host in hosts.split(","):
        parts = urlsplit(f"//{host}")
        if not parts.hostname:
            raise ValueError("a host is missing")
        nodes.append((parts.hostname, parts.port or default_port))
    return tuple(nodes)
