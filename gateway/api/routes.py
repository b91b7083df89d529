"""Routes, whose calls pass the policy chain first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Literal

from starlette.convertors import PathConvertor, register_url_convertor
from starlette.routing import BaseRoute, Match, Route, Router
from starlette.types import Receive, Scope, Send

from ...config import RequestError, shown
from ..call import Call
from ..caller import Needed
from ..server.http import Endpoint, Response, call_of
from ..serving.chain import PolicyChain
from ..serving.fields import collect_ignored

NO_LOADING = "there is one model here, which stays; name several in the setting models"


class _Name(PathConvertor):
    """A name in a path, with slashes as they are or as %2F."""

    regex = ".+"


register_url_convertor("name", _Name())


class PolicyRoute(Route):
    """A route whose calls pass the application's `chain` first.

    Attributes:
        needed: The scope that its callers need.
    """

    def __init__(self, route: str, needed: Needed, endpoint: Endpoint) -> None:
        """`route`: its methods and its path, such as "GET /v1/models" or "POST,PUT /generate"."""
        methods, _, path = route.partition(" ")

        super().__init__(path, endpoint, methods=methods.split(","))
        self.app = self._respond
        self.needed = needed
        self._answer = endpoint

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        call, app = call_of(scope, receive), scope["app"]
        call.params = scope["path_params"]
        response = await self.answer(call, app.chain, app.unknown_fields)
        await response(scope, receive, send)

    async def answer(
        self, call: Call, chain: PolicyChain, unknown_fields: Literal["refuse", "ignore"]
    ) -> Response:
        """Answer a call, after the chain.

        Raises:
            NanoInferenceError: The call is refused, or has failed.
        """
        call.route = self.path_format
        await chain.enter(call, self.needed)
        collect_ignored(call.account.ignored, unknown_fields)
        return await self._answer(call)

    def takes(self, call: Call) -> bool:
        """Return whether the route is for a call of its path and method."""
        return True


class RouteFor(PolicyRoute):
    """A route for some calls only."""

    def __init__(
        self, route: str, needed: Needed, endpoint: Endpoint, takes: Callable[[Call], bool]
    ) -> None:
        """`takes`: returns whether the route is for a call."""
        super().__init__(route, needed, endpoint)
        self._takes = takes

    def takes(self, call: Call) -> bool:
        return self._takes(call)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return super().matches(scope) if self._takes(call_of(scope)) else (Match.NONE, {})


class IndexedRouter(Router):
    """A router that compares a path without parameters with the routes of that path only, instead
    of with each route in turn."""

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for route in self._routes_of(scope["path"]):
                match, found = route.matches(scope)
                if match is Match.FULL:
                    scope.update(found, route=route)
                    await route.handle(scope, receive, send)
                    return
        # A path with parameters, or one that is to be refused or redirected.
        await super().app(scope, receive, send)

    def route_of(self, call: Call) -> PolicyRoute:
        """Return the route of a call whose path has no parameters.

        Raises:
            RequestError: not_found.
        """
        for route in self._routes_of(call.path):
            if not isinstance(route, PolicyRoute) or call.method not in (route.methods or ()):
                continue
            if route.takes(call):
                return route
        raise RequestError(f"there is nothing at {shown(call.path)}", code="not_found")

    def _routes_of(self, path: str) -> Sequence[BaseRoute]:
        """Return the routes that may be for a path without parameters, in order."""
        found = self._by_path.get(path, ())
        if found is None:
            found = self._by_path[path] = [
                each
                for each in self.routes
                if not isinstance(each, Route) or each.path_regex.match(path)
            ]
        return found

    @cached_property
    def _by_path(self) -> dict[str, list[BaseRoute] | None]:
        """The paths without parameters, with their routes once there was a call. Made at the first
        call, after all routes."""
        plain = [
            each.path
            for each in self.routes
            if isinstance(each, Route) and not each.param_convertors
        ]
        return dict.fromkeys(plain)
