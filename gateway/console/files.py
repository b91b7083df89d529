"""The console's static files."""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from importlib import resources
from mimetypes import guess_type

import msgspec

from ...config import RequestError, shown
from ...config.error_codes import remedies
from ..api.routes import PolicyRoute
from ..call import Call
from ..server.http import RedirectResponse, Response

INDEX = "index.html"

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
"""Content-Security-Policy: nothing inline, nothing of elsewhere, no text as HTML."""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Asked each time, answered by 304: the files are of this version of the gateway.
    "Cache-Control": "no-cache",
}
"""Headers of each file."""

_TEXT = ("text/", "application/javascript", "application/json", "image/svg")


class StaticFile(msgspec.Struct, frozen=True):
    """One file, as it is sent."""

    content: bytes
    packed: bytes
    etag: str
    media_type: str


@cache
def read_files() -> dict[str, StaticFile]:
    """Return all files by name, read and compressed once, and errors.json: the remedies."""
    folder = resources.files(__package__) / "static"
    contents = {each.name: each.read_bytes() for each in folder.iterdir()}
    contents["errors.json"] = msgspec.json.encode(remedies())
    return {name: _file(name, content) for name, content in contents.items()}


def file_routes() -> list[PolicyRoute]:
    """Return the routes of the page and its files. They hold nothing secret, and need no key."""
    files = read_files()

    async def page(call: Call) -> Response:
        # Names in the page are relative to its folder, also behind a proxy with a prefix.
        return RedirectResponse("console/", 307, HEADERS)

    async def file(call: Call) -> Response:
        name = call.params.get("file") or INDEX
        if (found := files.get(name)) is None:
            raise RequestError(f"the console has no file {shown(name)}", code="not_found")
        headers = HEADERS | {"ETag": found.etag, "Vary": "Accept-Encoding"}
        if found.etag in (call.header("if-none-match") or ""):
            return Response(status_code=304, headers=headers)
        content = found.content
        if "gzip" in (call.header("accept-encoding") or "") and len(found.packed) < len(content):
            content, headers["Content-Encoding"] = found.packed, "gzip"
        return Response(content, headers=headers, media_type=found.media_type)

    return [
        PolicyRoute("GET /console", "nothing", page),
        PolicyRoute("GET /console/", "nothing", file),
        PolicyRoute("GET /console/static/{file}", "nothing", file),
    ]


def _file(name: str, content: bytes) -> StaticFile:
    digest = hashlib.sha256(content).hexdigest()[:20]
    kind = guess_type(name)[0] or "text/plain"
    packed = gzip.compress(content, 9, mtime=0) if kind.startswith(_TEXT) else content
    return StaticFile(content, packed, f'"{digest}"', kind)
