"""What `status`, `top` and `health` read from a gateway, such as that of `serve`."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from ..config import ConfigError, RequestError, nearest, shown
from ..pipeline.status import PipelineStatus, of_models
from .answerer import Server
from .http_calls import HttpCalls


async def look_at_server(server: Server, model: str | None = None) -> PipelineStatus:
    """Take one look at the pipeline behind a gateway.

    Args:
        server: The gateway.
        model: Of several models only the one with this id; all when None.

    Raises:
        Unreachable: Nothing answers there.
        RequestError: The key is refused; or `unknown_model`.
        ConfigError: The server is none of ours.
    """
    async with HttpCalls(server) as calls:
        status, body = await calls.get("/status")
        if status == 404:
            raise ConfigError(f"{calls.root} has no /status; only nano-inference's servers have")
        try:
            found = msgspec.json.decode(body, type=PipelineStatus)
        except ValueError:
            raise ConfigError(f"{calls.root}/status is not an answer of nano-inference") from None
        found = replace(found, url=calls.root)
    return found if model is None else of_one_model(found, model)


def of_one_model(found: PipelineStatus, model: str) -> PipelineStatus:
    """What was seen of one model. Raises RequestError: `unknown_model`."""
    # While the only model is being loaded, its names are not known.
    known = set(found.models) or _names_of_the_only(found)
    if known and model not in known:
        raise RequestError(
            f"there is no model {shown(model)} here{nearest(model, sorted(known))}",
            code="unknown_model",
        )
    return of_models(found, (model,)) if found.models else found


def _names_of_the_only(found: PipelineStatus) -> set[str]:
    loads = [report.load for lane in found.lanes for report in lane.stages.values()]
    names = {str(load.get("model", "")) for load in loads}
    aliases = {alias for load in loads for alias in str(load.get("aliases", "")).split(",")}
    return (names | aliases) - {""}


async def probe(server: Server, path: str) -> str:
    """Ask a probe of a gateway, which needs no key.

    Returns:
        Why it says no; "" for yes.

    Raises:
        Unreachable: Nothing answers there.
        ConfigError: The server has no such probe.
        RequestError: It refuses to answer.
    """
    async with HttpCalls(server) as calls:
        # KServe's probe of a model says no with 400.
        status, body = await calls.get(path, refused=(400, 503))
    if status == 404:
        raise ConfigError(f"{calls.root} has no {path}")
    if status == 200:
        return ""
    try:
        told = msgspec.json.decode(body, type=dict[str, object])
    except ValueError:
        told = {}
    return str(told.get("reason") or told.get("error") or f"status {status}")
