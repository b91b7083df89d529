"""`/models/{id}/…`: all interfaces of one model below an address of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from ..server.http import NAMED_MODEL

PREFIX = "/models/"


class Entrance:
    """ASGI: takes the name of a model off a call's path, so that whatever looks at the path sees
    the one of an interface."""

    def __init__(self, app: ASGIApp, names: Callable[[], Collection[str]]) -> None:
        """`names`: gives those of all models."""
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if path.startswith(PREFIX):
            name, path = split(path, self._names())
            if path:
                state = {**scope.get("state", {}), NAMED_MODEL: name}
                scope = {**scope, "path": path, "raw_path": path.encode(), "state": state}
        await self._app(scope, receive, send)


def split(path: str, names: Collection[str]) -> tuple[str, str]:
    """The model's name and the path behind it; of two names that fit, the longer one. Where none
    fits, what looks like one. The path is "" where there is nothing behind."""
    rest = path.removeprefix(PREFIX)
    end = len(rest)
    while (end := rest.rfind("/", 0, end)) > 0:
        if rest[:end] in names:
            return rest[:end], rest[end:]
    name, slash, behind = rest.partition("/")
    return name, slash + behind
