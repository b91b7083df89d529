"""Routes, whose calls pass the policy chain first."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from starlette.convertors import PathConvertor, register_url_convertor
from starlette.requests import Request
from starlette.routing import Match, Route
from starlette.types import Scope

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

        @wraps(endpoint)
        async def checked(request: Request) -> Response:
            call = call_of(request.scope, request.receive)
            call.route, call.params = self.path_format, request.path_params
            chain: PolicyChain = request.app.chain
            await chain.enter(call, needed)
            collect_ignored(call.account.ignored, request.app.unknown_fields)
            return await endpoint(call)

        super().__init__(path, checked, methods=methods.split(","))
        self.needed = needed


class RouteFor(PolicyRoute):
    """A route for some calls only."""

    def __init__(
        self, route: str, needed: Needed, endpoint: Endpoint, takes: Callable[[Call], bool]
    ) -> None:
        """`takes`: returns whether the route is for a call."""
        super().__init__(route, needed, endpoint)
        self._takes = takes

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return super().matches(scope) if self._takes(call_of(scope)) else (Match.NONE, {})
