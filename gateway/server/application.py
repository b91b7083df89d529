"""The ASGI application of a gateway, or of one of its models."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Scope

from ...config import NanoInferenceError
from ..policy.chain import PolicyChain
from ..serving.measures import Measures
from .callers import JsonOnly
from .http import Respond, error_handler


class Application(Starlette):
    """Routes behind a policy chain. Errors are answered in the form of the called interface.

    Attributes:
        chain: The policy chain of every call.
        respond: Returns the response to a call that has an error.
    """

    def __init__(
        self,
        routes: Sequence[BaseRoute],
        chain: PolicyChain,
        measures: Measures,
        respond: Respond,
        takes_bytes: Callable[[Scope], bool],
        takes_compressed: Callable[[Scope], bool],
    ) -> None:
        """`takes_bytes`, `takes_compressed`: as for `JsonOnly`."""
        self.chain = chain
        self.respond = respond
        answer = error_handler(respond)
        super().__init__(
            routes=routes,
            middleware=[
                # Starlette raises an error again after it has answered 500, and the server then
                # closes the connection after an answer that doesn't announce that.
                Middleware(ExceptionMiddleware, handlers={Exception: answer}),
                Middleware(
                    JsonOnly,
                    measures,
                    respond,
                    takes_bytes=takes_bytes,
                    takes_compressed=takes_compressed,
                ),
            ],
            exception_handlers=dict.fromkeys(
                (NanoInferenceError, HTTPException, ClientDisconnect), answer
            ),
        )

    def entrance(self, calls: ASGIApp) -> ASGIApp:
        """Wrap the outermost layer of the server."""
        return calls
