"""Who may call: programs, and of web pages only those that the settings name.

A page that somebody has open in a browser can send requests to whatever that browser reaches, this
gateway among them. It can't read the answers, and it can't choose everything that it sends: Origin,
Sec-Fetch-Site, Host and (without asking first) User-Agent are the browser's words, and so is a
Content-Type other than that of forms and plain text. Here a request is judged by these. Sources:
https://fetch.spec.whatwg.org and https://www.w3.org/TR/fetch-metadata.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..config import GatewayConfig, RequestError, shown
from .http import error_response
from .measures import Measures, Reason

Endpoint = Callable[[Request], Awaitable[Response]]

_SHOWN = (
    "Retry-After",
    "X-Request-Id",
    "X-Should-Retry",
    "Request-Id",
    *(
        f"x-ratelimit-{what}-{of}"
        for of in ("requests", "tokens")
        for what in ("limit", "remaining", "reset")
    ),
)
"""Headers of answers that allowed pages may read."""


class _Refused(RequestError):
    """Who calls, or how, is not right; the reason is the error's code."""

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message, code=reason)
        self.reason: Reason = reason


def only_known_callers(app: ASGIApp, config: GatewayConfig, measures: Measures) -> ASGIApp:
    """An application with the checks that stand before all others.

    Preflights of allowed origins are answered here, and whatever else answers, be it a limit or a
    failure, their pages may read it.
    """
    if config.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=[origin.lower() for origin in config.allowed_origins],
            allow_methods=("GET", "POST", "PUT", "DELETE"),
            allow_headers=("*",),
            expose_headers=_SHOWN,
        )
    return _KnownCallers(app, config, measures)


class _KnownCallers:
    """ASGI: refuses what a browser sends for a page of another origin, or under another name.

    The name is for DNS rebinding: a page's own name may come to mean this machine, and the browser
    then takes the gateway for the page's server. It takes a name, so addresses pass.
    """

    def __init__(self, app: ASGIApp, config: GatewayConfig, measures: Measures) -> None:
        self._app = app
        self._measures = measures
        names = ("localhost", config.host, socket.gethostname(), *config.allowed_hosts)
        self._names = {name.lower() for name in names}
        self._origins = {origin.lower() for origin in config.allowed_origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Headers(scope=scope))
        app = self._app
        if refusal is not None:
            self._measures.refused(refusal.reason)
            app = response = error_response(refusal)
            if refusal.reason == "malformed":
                # Nobody knows where the next call would begin.
                response.headers["Connection"] = "close"
        await app(scope, receive, send)

    def _refusal(self, headers: Headers) -> _Refused | None:
        if "transfer-encoding" in headers and "content-length" in headers:
            # A proxy may go by the one and we by the other, and what is a body to it a call to us.
            return _Refused(
                "the length of the body is told in two ways; give Content-Length or chunks",
                "malformed",
            )
        host, origin = headers.get("host", ""), headers.get("origin")
        name = _name_of(host)
        if name not in self._names and not _is_address(name):
            return _Refused(
                f"this gateway is not known as {shown(name)}; call it by its address, or name the "
                "host in gateway.allowed_hosts",
                "forbidden_host",
            )
        if origin is not None and origin.lower() not in self._origins:
            return _of_a_page(f"this comes from a page of {shown(origin)}")
        # Requests for images, links and the like have no Origin.
        site = headers.get("sec-fetch-site", "none")
        if origin is None and site not in ("none", "same-origin"):
            return _of_a_page("this comes from a page of another site")
        return None


class JsonOnly:
    """ASGI: refuses bodies that do not say that they are JSON.

    A browser sends those of forms and plain text for any page, and asks first before any other.
    """

    def __init__(self, app: ASGIApp, measures: Measures) -> None:
        self._app = app
        self._measures = measures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        json = kind == "application/json" or (
            kind.startswith("application/") and kind.endswith("+json")
        )
        app = self._app
        if (body or kind) and not json:
            refusal = _Refused(
                f"the Content-Type is {shown(kind)}; send JSON, and with it the header "
                "'Content-Type: application/json'",
                "unsupported_media_type",
            )
            self._measures.refused(refusal.reason)
            app = error_response(refusal)
        await app(scope, receive, send)


def not_for_pages(endpoint: Endpoint, measures: Measures) -> Endpoint:
    """An endpoint with effects that is called by GET, which a page sends with an image's tag.

    To addresses without TLS browsers send neither Origin nor Sec-Fetch-Site with that. What no page
    can change is the browser's name, and all browsers' names begin with "Mozilla/".
    """

    async def answer(request: Request) -> Response:
        agent = request.headers.get("user-agent", "Mozilla/")
        if agent.startswith("Mozilla/") or "sec-fetch-site" in request.headers:
            refusal = _Refused(
                "browsers may not call this by GET; call it by POST, or give the program a name of "
                "its own in User-Agent",
                "forbidden_origin",
            )
            measures.refused(refusal.reason)
            raise refusal
        return await endpoint(request)

    return answer


def _of_a_page(why: str) -> _Refused:
    return _Refused(
        f"{why}; name the page's origin in gateway.allowed_origins if it may call the gateway",
        "forbidden_origin",
    )


def _name_of(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
