"""The index of routes: the same route as without it, and only those of the path are compared."""

from __future__ import annotations

from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route, Router

from nano_inference.gateway.api.routes import IndexedRouter

compared: list[str] = []


class Counted(Route):
    def matches(self, scope: Any) -> Any:
        compared.append(self.path)
        return super().matches(scope)


def route(path: str, *methods: str) -> Route:
    async def answer(request: Request) -> Response:
        return PlainTextResponse(f"{path} {methods} {request.path_params}")

    return Counted(path, answer, methods=methods or ("GET",))


ROUTES = [
    route("/a"),
    route("/a", "POST"),
    route("/{name}", "GET", "POST"),
    route("/b"),
    route("/c/d"),
    route("/c/{name}", "DELETE"),
    Mount("/m", routes=[route("/a")]),
    route("/m/a"),
]
PATHS = ("/a", "/a/", "/b", "/c", "/c/d", "/c/e", "/c/d/e", "/m/a", "/m/b", "/", "/%61", "/A", "")


async def test_the_index_changes_no_answer() -> None:
    def http(app: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a")

    async with http(Router(ROUTES)) as plain, http(IndexedRouter(ROUTES)) as indexed:
        for path in PATHS:
            for method in ("GET", "HEAD", "POST", "DELETE"):
                first = await plain.request(method, path)
                again = await indexed.request(method, path)
                found = (again.status_code, again.text, again.headers)
                assert found == (first.status_code, first.text, first.headers), (method, path)
        compared.clear()
        await indexed.get("/c/d")
        assert compared == ["/c/d"], "not the six before it"
