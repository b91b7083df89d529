"""Images are fetched by URL from allowed, public hosts only.

The attempts of `ATTEMPTS` are those of docs/security.md.
"""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpcore2
import pytest

from nano_inference.config import ConfigError, ImagesConfig, RequestError
from nano_inference.media.addresses import is_public
from nano_inference.media.fetch import ImageFetcher, Resolve

from ..certificates import Authority
from ..errors import raises

ANY = ImagesConfig(url_hosts=("*",))


def resolving(*addresses: str) -> Resolve:
    async def resolve(host: str, port: int) -> list[str]:
        return list(addresses)

    return resolve


# --- attempts ----------------------------------------------------------------------------------

# The URL, what its host resolves to, and the code of the refusal. None of them is dialled.
NUMERALS = ("127.1", "2130706433", "0x7f000001", "0177.0.0.1", "127.0.0.01", "0x7f.1", "1.2.3.4.5")
NOT_PUBLIC = {
    "loopback": "127.0.0.1",
    "loopback, elsewhere": "127.8.9.1",
    "this host": "0.0.0.0",
    "private": "10.1.2.3",
    "private, 172": "172.16.0.1",
    "private, 192": "192.168.1.1",
    "link-local": "169.254.1.1",
    "metadata": "169.254.169.254",
    "metadata of Azure": "168.63.129.16",
    "metadata of Alibaba": "100.100.100.200",
    "metadata of Oracle": "192.0.0.192",
    "carrier-grade NAT": "100.64.0.1",
    "multicast": "224.0.0.1",
    "broadcast": "255.255.255.255",
    "reserved": "240.0.0.1",
    "documentation": "192.0.2.1",
    "benchmarks": "198.18.0.1",
    "relay of 6to4": "192.88.99.1",
    "IPv6 loopback": "::1",
    "IPv6 unspecified": "::",
    "IPv6 link-local": "fe80::1",
    "IPv6 link-local with a zone": "fe80::1%1",
    "IPv6 site-local": "fec0::1",
    "IPv6 private": "fd00:ec2::254",
    "IPv6 multicast": "ff02::1",
    "IPv6 documentation": "2001:db8::1",
    "IPv4-mapped": "::ffff:127.0.0.1",
    "IPv4-mapped, public": "::ffff:93.184.216.34",
    "IPv4-compatible": "::127.0.0.1",
    "NAT64": "64:ff9b::7f00:1",
    "local NAT64": "64:ff9b:1::7f00:1",
    "6to4": "2002:7f00:1::",
    "Teredo": "2001:0:7f00:1::",
    "unassigned": "4000::1",
}
ATTEMPTS = {
    "a file": ("file:///etc/passwd", "invalid_image_url"),
    "another scheme": ("gopher://example.org/", "invalid_image_url"),
    "no scheme": ("//example.org/a.png", "invalid_image_url"),
    "no host": ("http:///a.png", "invalid_image_url"),
    "credentials": ("http://user:word@example.org/", "invalid_image_url"),
    "a host in the credentials": ("http://example.org@127.0.0.1/", "invalid_image_url"),
    "another port": ("http://example.org:6379/", "invalid_image_url"),
    "port 0": ("http://example.org:0/", "invalid_image_url"),
    "no port at all": ("http://example.org:99999/", "invalid_image_url"),
    "a backslash": ("http://example.org\\@127.0.0.1/", "invalid_image_url"),
    "a line end": ("http://example.org/\r\nX: y", "invalid_image_url"),
    "a space": ("http://example.org /", "invalid_image_url"),
    "wide digits": ("http://\uff11\uff12\uff17.0.0.1/", "invalid_image_url"),
    "a circled letter": ("http://\u24dbocalhost/", "invalid_image_url"),
    "a percent-encoded host": ("http://%31%32%37.0.0.1/", "invalid_image_url"),
    "a zone": ("http://[fe80::1%25eth0]/", "invalid_image_url"),
    "broken brackets": ("http://[::1/", "invalid_image_url"),
    "a very long one": ("http://example.org/" + "a" * 9000, "invalid_image_url"),
    **{f"odd numbers, {host}": (f"http://{host}/", "invalid_image_url") for host in NUMERALS},
    **{
        name: (f"http://{address if ':' not in address else f'[{address}]'}/", "image_host_refused")
        for name, address in NOT_PUBLIC.items()
        if "%" not in address
    },
}


@pytest.fixture
def dials(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that were dialled; nothing answers."""
    found: list[str] = []

    async def connect(self: object, host: str, *_: object) -> None:
        found.append(host)
        raise httpcore2.ConnectError("nothing there")

    monkeypatch.setattr(httpcore2.AnyIOBackend, "connect_tcp", connect)
    return found


@pytest.mark.parametrize("name", ATTEMPTS)
async def test_a_bad_url_is_refused_before_anything_is_dialled(name: str, dials: list[str]) -> None:
    url, code = ATTEMPTS[name]

    async def resolve(host: str, port: int) -> list[str]:
        assert ":" in host or host.replace(".", "").isdigit(), "only addresses get here"
        return [host]

    with raises(code, "send the image itself"):
        await ImageFetcher(ANY, resolve).fetch(url)
    assert dials == []


@pytest.mark.parametrize("name", NOT_PUBLIC)
async def test_a_name_of_a_bad_address_is_refused(name: str, dials: list[str]) -> None:
    fetcher = ImageFetcher(ANY, resolving(NOT_PUBLIC[name]))
    with raises("image_host_refused"):
        await fetcher.fetch("https://example.org/a.png", "messages[0]")
    assert dials == []


async def test_a_name_with_one_bad_address_among_good_ones_is_refused(dials: list[str]) -> None:
    fetcher = ImageFetcher(ANY, resolving("93.184.216.34", "127.0.0.1"))
    with raises("image_host_refused") as refused:
        await fetcher.fetch("https://example.org/a.png")
    assert "127.0.0.1" not in str(refused.value), "what a name means here is not told"
    assert dials == []


async def test_good_addresses_are_dialled_in_their_order(dials: list[str]) -> None:
    fetcher = ImageFetcher(ANY, resolving("93.184.216.34", "2606:2800:220:1::1"))
    with raises("image_not_fetched", "can't be reached"):
        await fetcher.fetch("https://example.org/a.png")
    assert dials == ["93.184.216.34", "2606:2800:220:1::1"]


async def test_no_url_is_fetched_unless_hosts_are_allowed(dials: list[str]) -> None:
    with raises("image_urls_off", "images.url_hosts"):
        await ImageFetcher(ImagesConfig()).fetch("https://example.org/a.png")
    some = ImagesConfig(url_hosts=("a.example.org", "*.b.example.org"))
    fetcher = ImageFetcher(some, resolving("93.184.216.34"))
    for host in ("example.org", "b.example.org", "xa.example.org", "a.example.org.evil.net"):
        with raises("image_host_refused", "not fetched from"):
            await fetcher.fetch(f"https://{host}/")
    assert dials == []
    for host in ("a.example.org", "A.EXAMPLE.org", "a.example.org.", "x.y.b.example.org"):
        with raises("image_not_fetched"):
            await fetcher.fetch(f"https://{host}/")
    assert len(dials) == 4


@pytest.mark.parametrize(
    "setting",
    [
        {"url_hosts": ("https://example.org",)},
        {"url_networks": ("10.0.0.1/8",)},
        {"url_ports": (0,)},
    ],
)
def test_bad_settings_are_refused(setting: dict[str, tuple[object, ...]]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        ImagesConfig(**setting)  # type: ignore[arg-type]


def test_public_addresses_are_public() -> None:
    for address in ("1.1.1.1", "93.184.216.34", "2606:4700::1111"):
        assert is_public(ipaddress.ip_address(address))


# --- with a server -----------------------------------------------------------------------------

Answers = Callable[[str], bytes]


class Local:
    """A server on this machine. `heads` are those of its requests."""

    def __init__(self, answer: Answers, tls: ssl.SSLContext | None = None) -> None:
        self.heads: list[str] = []
        self._answer, self._tls = answer, tls

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[int]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        async with server:
            yield server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        writer.write(self._answer(head.split()[1]))
        writer.close()


def local(port: int, **settings: object) -> ImagesConfig:
    """Settings with which loopback may be fetched from."""
    return ImagesConfig(
        url_hosts=("*",),
        url_networks=("127.0.0.1/32",),
        url_ports=(port,),
        **settings,  # type: ignore[arg-type]
    )


def ok(body: bytes, *fields: str) -> bytes:
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *fields, "", ""]
    return "\r\n".join(lines).encode() + body


def to(location: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()


async def test_an_image_is_fetched_by_name_without_cookies_and_proxies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server = Local(lambda path: ok(b"pixels", "Set-Cookie: a=b") if path == "/b" else to("/b"))
    async with server.serving() as port:
        fetcher = ImageFetcher(local(port), resolving("127.0.0.1"))
        assert await fetcher.fetch(f"http://example.org:{port}/a?x=1#part") == b"pixels"
    assert server.heads[0].startswith("GET /a?x=1 HTTP/1.1")
    for head in server.heads:
        assert f"Host: example.org:{port}" in head
        assert "identity" in head
        assert "cookie" not in head.lower()


def contexts(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The server's, for "localhost", and one of a client that trusts it."""
    authority = Authority(folder)
    issued = authority.issue("server")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(issued.certificate, issued.key)
    return tls, ssl.create_default_context(cafile=str(authority.file))


async def test_tls_is_checked_against_the_name_in_the_url(tmp_path: Path) -> None:
    tls, trusting = contexts(tmp_path)
    names: list[str | None] = []
    tls.sni_callback = lambda _, name, __: names.append(name)
    server = Local(lambda path: ok(b"pixels"), tls)
    async with server.serving() as port:
        fetcher = ImageFetcher(local(port), resolving("127.0.0.1"), trusting)
        assert await fetcher.fetch(f"https://localhost:{port}/") == b"pixels"
        with raises("image_not_fetched"):
            await fetcher.fetch(f"https://example.org:{port}/")
        with raises("image_not_fetched"):
            await ImageFetcher(local(port), resolving("127.0.0.1")).fetch(
                f"https://localhost:{port}/"
            )
    assert names[:2] == ["localhost", "example.org"]


REDIRECTS = {
    "to a private address": ("http://10.0.0.1:{port}/", "image_host_refused"),
    "to metadata": ("http://169.254.169.254:{port}/latest/", "image_host_refused"),
    "to a name of a private address": ("http://inside.example.org:{port}/", "image_host_refused"),
    "to another port": ("http://example.org:1/", "invalid_image_url"),
    "to a file": ("file:///etc/passwd", "invalid_image_url"),
    "to credentials": ("http://u:p@example.org:{port}/", "invalid_image_url"),
    "to odd numbers": ("http://2130706433:{port}/", "invalid_image_url"),
    "to nonsense": ("http://[/", "invalid_image_url"),
    "in a circle": ("/", "image_not_fetched"),
}


@pytest.mark.parametrize("name", REDIRECTS)
async def test_a_bad_redirect_is_refused(name: str) -> None:
    location, code = REDIRECTS[name]

    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1" if host == "example.org" else "10.0.0.1" if "in" in host else host]

    ports: list[int] = []
    server = Local(lambda path: to(location.format(port=ports[0])))
    async with server.serving() as port:
        ports.append(port)
        with raises(code):
            await ImageFetcher(local(port), resolve).fetch(f"http://example.org:{port}/")
    assert len(server.heads) == (4 if name == "in a circle" else 1)


async def test_a_redirect_from_https_to_http_is_refused(tmp_path: Path) -> None:
    tls, trusting = contexts(tmp_path)
    ports: list[int] = []
    server = Local(lambda path: to(f"http://localhost:{ports[0]}/"), tls)
    async with server.serving() as port:
        ports.append(port)
        fetcher = ImageFetcher(local(port), resolving("127.0.0.1"), trusting)
        with raises("invalid_image_url", "https to http"):
            await fetcher.fetch(f"https://localhost:{port}/")


async def test_a_name_is_resolved_once_for_the_check_and_the_connection() -> None:
    """A name whose address changes between the two gains nothing."""
    answers = iter((["127.0.0.1"], ["10.0.0.1"]))

    async def resolve(host: str, port: int) -> list[str]:
        return next(answers)

    async with Local(lambda path: ok(b"pixels")).serving() as port:
        fetcher = ImageFetcher(local(port), resolve)
        assert await fetcher.fetch(f"http://example.org:{port}/") == b"pixels"
        with raises("image_host_refused"):
            await fetcher.fetch(f"http://example.org:{port}/")


BAD_ANSWERS = {
    "too large by its length": (ok(bytes(200)), "image_too_large"),
    "too large without length": (b"HTTP/1.1 200 OK\r\n\r\n" + bytes(200), "image_too_large"),
    "too large in chunks": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"8\r\n12345678\r\n" * 20,
        "image_too_large",
    ),
    "compressed": (ok(b"small", "Content-Encoding: gzip"), "image_not_fetched"),
    "not found": (b"HTTP/1.1 404 Not Found\r\n\r\n", "image_not_fetched"),
    "a redirect to nowhere": (b"HTTP/1.1 302 Found\r\n\r\n", "image_not_fetched"),
    "cut off": (b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\nfew", "image_not_fetched"),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.6\r\n", "image_not_fetched"),
    "nothing": (b"", "image_not_fetched"),
    "an endless head": (b"HTTP/1.1 200 OK\r\nA: " + b"a" * 200_000, "image_not_fetched"),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
async def test_a_bad_answer_is_refused(name: str) -> None:
    answer, code = BAD_ANSWERS[name]
    async with Local(lambda path: answer).serving() as port:
        fetcher = ImageFetcher(local(port, max_bytes=100), resolving("127.0.0.1"))
        with raises(code):
            await fetcher.fetch(f"http://example.org:{port}/")


async def test_the_time_in_all_is_limited() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        config = local(port, url_timeout_s=0.1)
        with raises("image_not_fetched", "longer than 0.1 s"):
            await ImageFetcher(config, resolving("127.0.0.1")).fetch(f"http://example.org:{port}/")

    async def slow(host: str, port: int) -> list[str]:
        await asyncio.sleep(60)
        return []

    with raises("image_not_fetched", "longer than"):
        await ImageFetcher(config, slow).fetch(f"http://example.org:{port}/")


async def test_a_name_without_address_is_not_fetched() -> None:
    async def unknown(host: str, port: int) -> list[str]:
        raise OSError("no such name")

    with raises("image_not_fetched", kind=RequestError):
        await ImageFetcher(ANY, unknown).fetch("https://example.org/")
