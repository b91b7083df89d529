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
from collections.abc import Awaitable, Callable, Collection

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ...config import GatewayConfig, RequestError, shown
from ...config.logger import get_logger
from ..serving.measures import Measures, Reason
from .http import Respond, respond_plainly

Endpoint = Callable[[Request], Awaitable[Response]]

_SHOWN = (
    "Retry-After",
    "X-Request-Id",
    "X-Should-Retry",
    "Request-Id",
    "X-Error-Code",
    "Inference-Header-Content-Length",
    *(
        f"x-ratelimit-{what}-{of}"
        for of in ("requests", "tokens")
        for what in ("limit", "remaining", "reset")
    ),
)
"""Headers of answers that allowed pages may read."""


_BYTES = "application/octet-stream"
_NO_ORIGIN = "null"
# How all browsers' names begin.
_BROWSERS = "Mozilla/"


def _never(scope: Scope) -> bool:
    return False


class _Refused(RequestError):
    """Who calls, or how, is not right; the reason is the error's code."""

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message, code=reason)
        self.reason: Reason = reason


def only_known_callers(
    app: ASGIApp, config: GatewayConfig, measures: Measures, respond: Respond = respond_plainly
) -> ASGIApp:
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
    return _KnownCallers(app, config, measures, respond)


class _KnownCallers:
    """ASGI: refuses what a browser sends for a page of another origin, or under another name.

    The name is for DNS rebinding: a page's own name may come to mean this machine, and the browser
    then takes the gateway for the page's server. It takes a name, so addresses pass.
    """

    def __init__(
        self, app: ASGIApp, config: GatewayConfig, measures: Measures, respond: Respond
    ) -> None:
        self._app = app
        self._measures = measures
        self._respond = respond
        names = ("localhost", config.host, socket.gethostname(), *config.allowed_hosts)
        self._names = {name.lower() for name in names}
        self._origins = {origin.lower() for origin in config.allowed_origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Headers(scope=scope))
        app = self._app
        if refusal is not None:
            self._measures.refused(refusal.reason)
            # A browser doesn't show its user the body.
            get_logger().warning(refusal.reason, error=refusal.message)
            app = self._respond(scope, refusal)
        await app(scope, receive, send)

    def _refusal(self, headers: Headers) -> _Refused | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        name = _name_of(host)
        if name not in self._names and not _is_address(name):
            return _Refused(
                f"this gateway is not known as {shown(name)}; call it by its address, or name the "
                "host in gateway.allowed_hosts",
                "forbidden_host",
            )
        if origin == _NO_ORIGIN:
            return _Refused(
                "this comes from a page without an origin, such as a local file or a sandboxed "
                "frame, and those can't be allowed; serve the page over HTTP, and add that origin "
                "to the setting gateway.allowed_origins",
                "forbidden_origin",
            )
        if origin is not None and origin.lower() not in self._origins:
            return _of_a_page(f"this comes from a page of {shown(origin)}")
        # Requests for images, links and the like have no Origin.
        site = headers.get("sec-fetch-site", "none")
        if origin is None and site not in ("none", "same-origin"):
            return _of_a_page("this comes from a page of another site")
        return None


class JsonOnly:
    """ASGI: refuses bodies that do not say that they are JSON, or say that they are compressed.

    A browser sends those of forms and plain text for any page, and asks first before any other.
    Where bytes are taken, so are bodies of which programs say nothing. A page's script can send
    such a one without asking, but under no other name than its browser's.
    """

    def __init__(
        self,
        app: ASGIApp,
        measures: Measures,
        respond: Respond = respond_plainly,
        *,
        takes_bytes: Callable[[Scope], bool] = _never,
        takes_compressed: Callable[[Scope], bool] = _never,
    ) -> None:
        """`takes_bytes`, `takes_compressed`: where such bodies are taken besides."""
        self._app = app
        self._measures = measures
        self._respond = respond
        self._takes_bytes = takes_bytes
        self._takes_compressed = takes_compressed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        kinds = [_BYTES] if self._takes_bytes(scope) else []
        if kinds and not _is_browser(headers, headers.get("user-agent", "")):
            kinds.append("")
        refusal = _refused_kind(headers, kinds)
        if refusal is None and not self._takes_compressed(scope):
            refusal = _refused_coding(headers)
        app = self._app
        # A call without an endpoint is answered 404 or 405, and its body is not read.
        if refusal is not None and _has_endpoint(scope):
            self._measures.refused(refusal.reason)
            app = self._respond(scope, refusal)
        await app(scope, receive, send)


def _has_endpoint(scope: Scope) -> bool:
    """Whether the application itself has a route for a call; an application behind it checks the
    calls that it gets."""
    routes = (each for each in scope["app"].routes if isinstance(each, Route))
    return any(route.matches(scope)[0] == Match.FULL for route in routes)


def _refused_kind(headers: Headers, more: Collection[str]) -> _Refused | None:
    """Why a body can't be read, by what is said of it; None when it may be.

    Args:
        more: Kinds that are taken beside JSON.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    json = kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )
    if (body or kind) and not json and kind not in more:
        return _Refused(
            f"the Content-Type is {shown(kind)}; send JSON, and with it the header "
            "'Content-Type: application/json'",
            "unsupported_media_type",
        )
    return None


def _refused_coding(headers: Headers) -> _Refused | None:
    codings = ",".join(headers.getlist("content-encoding"))
    named = {coding.strip().lower() for coding in codings.split(",")}
    if not named <= {"", "identity"}:
        return _Refused(
            f"the Content-Encoding is {shown(codings)}; send the body as it is, without it",
            "unsupported_media_type",
        )
    return None


def not_for_pages(endpoint: Endpoint, measures: Measures) -> Endpoint:
    """An endpoint with effects that is called by GET, which a page sends with an image's tag.

    To addresses without TLS browsers send neither Origin nor Sec-Fetch-Site with that. What no page
    can change is the browser's name, and all browsers' names begin with "Mozilla/".
    """

    async def answer(request: Request) -> Response:
        if _is_browser(request.headers, request.headers.get("user-agent", _BROWSERS)):
            refusal = _Refused(
                "browsers may not call this by GET; call it by POST, or give the program a name of "
                "its own in User-Agent",
                "forbidden_origin",
            )
            measures.refused(refusal.reason)
            raise refusal
        return await endpoint(request)

    return answer


def _is_browser(headers: Headers, agent: str) -> bool:
    return agent.startswith(_BROWSERS) or "sec-fetch-site" in headers


def _of_a_page(why: str) -> _Refused:
    return _Refused(
        f"{why}; if it may call the gateway, add its origin to the setting gateway.allowed_origins",
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
