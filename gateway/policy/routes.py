"""Routes that say what their callers need."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import wraps

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .caller import ROUTE
from .chain import PolicyChain
from .scopes import Needed


class PolicyRoute(Route):
    """A route whose calls go through the application's `state.chain` first.

    Attributes:
        needed: What it asks of its callers.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        *,
        needed: Needed,
        methods: Collection[str],
        middleware: Sequence[Middleware] = (),
    ) -> None:
        @wraps(endpoint)
        async def checked(request: Request) -> Response:
            request.scope.setdefault("state", {})[ROUTE] = (self.path_format, needed)
            chain: PolicyChain = request.app.state.chain
            await chain.enter(request, needed)
            return await endpoint(request)

        super().__init__(path, checked, methods=list(methods), middleware=list(middleware))
        self.needed = needed
