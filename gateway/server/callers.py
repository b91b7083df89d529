"""Protection against web pages: CSRF, DNS rebinding, CORS.

A page open in a browser can send requests to any address the browser reaches, this gateway
included. It can't read the responses, and can't set some headers: Origin, Sec-Fetch-Site, Host,
User-Agent (without a preflight), and a Content-Type other than that of forms and plain text.
Requests are judged by these. Sources: https://fetch.spec.whatwg.org and
https://www.w3.org/TR/fetch-metadata.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Collection
from dataclasses import InitVar, dataclass

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ...config import GatewayConfig, RequestError, shown
from ...config.logger import get_logger
from ..call import IGNORED_HEADER, Call
from .http import Endpoint, Respond, Response, call_of, respond_plainly
from .measures import Measures, Reason

_SHOWN = (
    "Retry-After",
    "X-Request-Id",
    "X-Should-Retry",
    "Request-Id",
    "X-Error-Code",
    IGNORED_HEADER,
    "Inference-Header-Content-Length",
    *(
        f"x-ratelimit-{what}-{of}"
        for of in ("requests", "tokens")
        for what in ("limit", "remaining", "reset")
    ),
)
"""Response headers that allowed pages may read."""


_BYTES = "application/octet-stream"
_FORM = "application/x-www-form-urlencoded"
_FILES = "multipart/form-data"
_NO_ORIGIN = "null"
# The beginning of every browser's User-Agent.
_BROWSERS = "Mozilla/"


class _Refused(RequestError):
    """The caller, or the form of the call, is refused; the reason is the error's code."""

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message, code=reason)
        self.reason: Reason = reason


def only_known_callers(
    app: ASGIApp, config: GatewayConfig, measures: Measures, respond: Respond = respond_plainly
) -> ASGIApp:
    """Wrap an application with the checks before all others.

    Preflights of allowed origins are answered here, and their pages may read every response, also
    that of a limit or a failure.
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


@dataclass(eq=False)
class _KnownCallers:
    """ASGI: refuses calls of pages of other origins, and calls to other host names.

    The host name protects against DNS rebinding: a page's own name may resolve to this machine. It
    needs a name, so addresses pass.
    """

    app: ASGIApp
    config: InitVar[GatewayConfig]
    measures: Measures
    respond: Respond

    def __post_init__(self, config: GatewayConfig) -> None:
        names = ("localhost", config.host, socket.gethostname(), *config.allowed_hosts)
        self._names = {name.lower() for name in names}
        self._origins = {origin.lower() for origin in config.allowed_origins}
        self._console = config.console

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Headers(scope=scope), scope.get("scheme", "http"))
        app = self.app
        if refusal is not None:
            self.measures.refused(refusal.reason)
            # Browsers don't show the body.
            get_logger().warning(refusal.reason, error=refusal.message)
            app = self.respond(call_of(scope), refusal)
        await app(scope, receive, send)

    def _refusal(self, headers: Headers, scheme: str) -> _Refused | None:
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
        if self._console and origin is not None and _is_same(origin, host, scheme, headers):
            return None  # the console, which this gateway has served
        if origin is not None and origin.lower() not in self._origins:
            return _of_a_page(f"this comes from a page of {shown(origin)}")
        # Requests for images, links and the like have no Origin.
        site = headers.get("sec-fetch-site", "none")
        if origin is None and site not in ("none", "same-origin"):
            return _of_a_page("this comes from a page of another site")
        return None


@dataclass(frozen=True)
class JsonOnly:
    """ASGI: refuses bodies whose Content-Type isn't JSON, and compressed bodies.

    A browser sends forms and plain text for any page, and a preflight before anything else. Some
    endpoints also take bodies without a Content-Type, and JSON that is declared as a form, as by
    `curl -d`, unless the User-Agent is a browser's: a page's script can send these without a
    preflight.

    Attributes:
        takes_bytes: Returns whether a call may have a body of bytes, with or without a
            Content-Type.
        takes_forms: Returns whether a call's JSON may be declared as a form, or as nothing.
        takes_compressed: Returns whether a call may have a compressed body.
        takes_files: Returns whether a call may be a form with a file, unless from a browser.
    """

    app: ASGIApp
    measures: Measures
    respond: Respond
    takes_bytes: Callable[[Call], bool]
    takes_forms: Callable[[Call], bool]
    takes_compressed: Callable[[Call], bool]
    takes_files: Callable[[Call], bool]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, call = Headers(scope=scope), call_of(scope)
        kinds = [_BYTES] if self.takes_bytes(call) else []
        unsure = ["", _FORM] if self.takes_forms(call) else [""] * len(kinds)
        unsure += [_FILES] if self.takes_files(call) else []
        if unsure and not _is_browser(headers, headers.get("user-agent", "")):
            kinds += unsure
        refusal = _refused_kind(headers, kinds)
        if refusal is None and not self.takes_compressed(call):
            refusal = _refused_coding(headers)
        app = self.app
        # A call without an endpoint is answered with 404 or 405, and its body is not read.
        if refusal is not None and _has_endpoint(scope):
            self.measures.refused(refusal.reason)
            app = self.respond(call_of(scope), refusal)
        await app(scope, receive, send)


def _has_endpoint(scope: Scope) -> bool:
    """Return whether the application itself has a route for a call. A model's application checks
    its own calls."""
    routes = (each for each in scope["app"].routes if isinstance(each, Route))
    return any(route.matches(scope)[0] == Match.FULL for route in routes)


def _refused_kind(headers: Headers, more: Collection[str]) -> _Refused | None:
    """Return the refusal of a body by its Content-Type; None if it is accepted.

    Args:
        more: Accepted types beside JSON.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    json = kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )
    # aiohttp declares a body so that isn't there, and no page can without a preflight.
    nothing = kind == _BYTES and not body and "content-length" in headers
    if (body or kind) and not (json or nothing) and kind not in more:
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
    """Refuse browsers at an endpoint with effects that is called by GET, as by an image's tag.

    Without TLS, browsers send neither Origin nor Sec-Fetch-Site with that. A page can't change the
    User-Agent, which begins with "Mozilla/" in every browser.
    """

    async def answer(call: Call) -> Response:
        headers = Headers(raw=list(call.headers))
        if _is_browser(headers, headers.get("user-agent", _BROWSERS)):
            refusal = _Refused(
                "browsers may not call this by GET; call it by POST, or give the program a name of "
                "its own in User-Agent",
                "forbidden_origin",
            )
            measures.refused(refusal.reason)
            raise refusal
        return await endpoint(call)

    return answer


def _is_browser(headers: Headers, agent: str) -> bool:
    return agent.startswith(_BROWSERS) or "sec-fetch-site" in headers


def _is_same(origin: str, host: str, scheme: str, headers: Headers) -> bool:
    """Return whether a page has the origin that it calls, which has passed the check of names.

    Behind a proxy with TLS the scheme differs, but a browser then says so itself.
    """
    says_so = headers.get("sec-fetch-site") == "same-origin"
    page_scheme, _, page_host = origin.lower().partition("://")
    return page_host == host.lower() and (says_so or page_scheme == scheme)


def _of_a_page(why: str) -> _Refused:
    return _Refused(
        f"{why}; if it may call the gateway, add its origin to the setting gateway.allowed_origins",
        "forbidden_origin",
    )


def _name_of(host: str) -> str:
    """Return a Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
