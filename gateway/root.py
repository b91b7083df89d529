"""What somebody sees who opens the gateway's address."""

from __future__ import annotations

from importlib import metadata

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from .policy.routes import PolicyRoute


def root_routes() -> list[PolicyRoute]:
    """The endpoint."""
    version = metadata.version("nano-inference")
    line = (
        f"nano-inference {version}, an LLM inference server: OpenAI's interface is at /v1 "
        "(/v1/models lists the models), metrics are at /metrics, readiness is at /readyz; the "
        "documentation is in docs/ of its repository, all endpoints in docs/gateway.md\n"
    )

    async def told(request: Request) -> Response:
        return PlainTextResponse(line)

    return [PolicyRoute("/", told, needed="nothing", methods=["GET"])]
