"""Fetching of images by URL, as far as `addresses` allows it."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any

import anyio
import httpcore2

from ..config import ImagesConfig, NanoInferenceError, RequestError
from ..config.logger import get_logger
from .addresses import Target, UrlRules, check_addresses, check_url, image_rules, redirected
from .decoder import refusal

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Returns the addresses of a host."""

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HEADERS = (
    (b"User-Agent", b"nano-inference"),
    (b"Accept", b"image/png, image/jpeg, image/webp, image/gif"),
    # The body's size is limited as it arrives, so it must not grow when it is unpacked.
    (b"Accept-Encoding", b"identity"),
    (b"Connection", b"close"),
)


class ImageFetcher:
    """Fetches images by URL, without cookies, and without proxies of the environment.

    A host is resolved once, all its addresses are checked, and one of these is dialled: a name that
    has another address a moment later (DNS rebinding) gains nothing. Each redirect is checked anew.
    """

    def __init__(
        self,
        config: ImagesConfig,
        resolve: Resolve | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """Args:
        config: Limits, and the allow list.
        resolve: By default the system's resolver.
        ssl_context: By default certificates are checked as httpx does.
        """
        self._config, self._rules = config, image_rules(config)
        self._resolve = resolve
        self._ssl = ssl_context

    async def fetch(self, url: str, where: str = "image") -> bytes:
        """Return the content of an image's URL; what it is, only decoding shows.

        Args:
            where: The image in a request, for errors.

        Raises:
            RequestError: image_urls_off, invalid_image_url, image_host_refused, image_not_fetched,
                image_too_large.
        """
        target = check_url(url, self._rules, where)
        try:
            with anyio.fail_after(self._config.url_timeout_s):
                return await self._follow(target, where)
        except TimeoutError:
            limit = f"{self._config.url_timeout_s:g} s (images.url_timeout_s)"
            raise _not_fetched(where, f"it took longer than {limit}") from None
        except (httpcore2.NetworkError, httpcore2.ProtocolError, OSError) as error:
            # The reason would tell a client about ports and hosts that it can't reach.
            get_logger().info("image_not_fetched", host=target.host, error=repr(error))
            raise _not_fetched(where, "its server can't be reached, or breaks off") from None

    async def _follow(self, target: Target, where: str) -> bytes:
        for _ in range(self._config.url_redirects + 1):
            found = await self._get(target, where)
            if isinstance(found, bytes):
                return found
            target = found
        limit = f"{self._config.url_redirects} redirects (images.url_redirects)"
        raise _not_fetched(where, f"it has more than {limit}")

    async def _get(self, target: Target, where: str) -> bytes | Target:
        """Return the content, or where a redirect leads."""
        backend = CheckedBackend(self._rules, where, self._resolve)
        url = httpcore2.URL(
            scheme=target.scheme, host=target.host, port=target.port, target=target.path
        )
        async with (
            httpcore2.AsyncConnectionPool(
                ssl_context=self._ssl, http2=False, network_backend=backend
            ) as pool,
            pool.stream("GET", url, headers=_HEADERS) as response,
        ):
            headers = {name.lower(): value for name, value in response.headers}
            if response.status in _REDIRECTS and b"location" in headers:
                location = headers[b"location"].decode("latin-1")
                return redirected(target, location, self._rules, where)
            if response.status != 200:
                raise _not_fetched(where, f"its server answers with status {response.status}")
            if headers.get(b"content-encoding", b"identity").lower() != b"identity":
                raise _not_fetched(where, "its server compresses it, although asked not to")
            return await self._body(response, headers.get(b"content-length", b""), where)

    async def _body(self, response: httpcore2.Response, length: bytes, where: str) -> bytes:
        most = self._config.max_bytes
        if length.isdigit() and int(length[:20]) > most:
            raise self._too_large(where)
        body = bytearray()
        async with aclosing(response.aiter_stream()) as chunks:
            async for chunk in chunks:
                body += chunk
                if len(body) > most:
                    raise self._too_large(where)
        return bytes(body)

    def _too_large(self, where: str) -> RequestError:
        most = self._config.max_bytes
        reason = f"its file has more than {most} bytes (images.max_bytes); scale it down"
        return refusal("image_too_large", where, reason)


class CheckedBackend(httpcore2.AsyncNetworkBackend):
    """Dials checked addresses only. TLS and the Host header keep the URL's name."""

    def __init__(self, rules: UrlRules, where: str, resolve: Resolve | None = None) -> None:
        self._rules, self._where, self._resolve = rules, where, resolve or _resolve
        self._tcp = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Resolve a host once, check all addresses, and connect to the first that answers."""
        try:
            resolved = await self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise httpcore2.ConnectError(str(error)) from error
        addresses = check_addresses(host, resolved, self._rules, self._where)
        for address in addresses[:-1]:
            try:
                return await self._tcp.connect_tcp(str(address), port, timeout)
            except httpcore2.ConnectError:
                continue
        return await self._tcp.connect_tcp(str(addresses[-1]), port, timeout)


async def _resolve(host: str, port: int) -> list[str]:
    found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


def _not_fetched(where: str, reason: str) -> NanoInferenceError:
    return RequestError(
        f"{where} can't be fetched: {reason}; send the image itself, as base64",
        code="image_not_fetched",
    )
