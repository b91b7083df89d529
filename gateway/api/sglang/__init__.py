"""The HTTP interface that RL trainers expect of an SGLang server; docs/gateway.md lists it."""

from __future__ import annotations

from functools import partial

from ...policy.chain import PolicyRoute
from ...policy.document import Needed
from ...server.callers import Endpoint, not_for_pages
from ...serving.services import Services
from .generate import Generation, encode
from .info import ServerInfoCalls
from .sync import VersionLabels, WeightSync
from .weights import WeightCalls

# The first of `effects` may be called by GET as well, as SGLang allows.
_NUM_EFFECTS = {"none": 0, "flush_cache": 1, "all": 3}


def sglang_routes(services: Services) -> list[PolicyRoute]:
    """Return the endpoints."""
    gateway = services.config.gateway
    labels = VersionLabels()
    sync = WeightSync(services.engine, labels, gateway.sync_timeout_s)
    generation = Generation(services, labels)
    info = ServerInfoCalls(services, sync, labels)
    weights = WeightCalls(services, sync)
    read, write = ["GET"], ["POST"]

    def route(path: str, endpoint: Endpoint, methods: list[str], needed: Needed) -> PolicyRoute:
        return PolicyRoute(path, endpoint, needed=needed, methods=methods)

    routes = [
        route("/generate", generation.generate, ["POST", "PUT"], "generate"),
        route("/encode", partial(encode, services), ["POST", "PUT"], "generate"),
        route("/abort_request", info.abort_request, write, "generate"),
        route("/flush_cache", info.flush_cache, write, "weights"),
        route("/pause_generation", weights.pause, write, "weights"),
        route("/continue_generation", weights.resume, write, "weights"),
        route("/init_weights_update_group", weights.init_group, write, "weights"),
        route("/destroy_weights_update_group", weights.destroy_group, write, "weights"),
        route("/begin_weight_update", weights.begin, write, "weights"),
        route("/end_weight_update", weights.end, write, "weights"),
        route("/update_weights_from_disk", weights.from_disk, write, "weights"),
        route("/update_weights_from_distributed", weights.from_distributed, write, "weights"),
        route("/update_weights_from_tensor", weights.from_tensor, write, "weights"),
        route("/update_weight_version", weights.rename, write, "weights"),
        route("/load_lora_adapter", weights.load_adapter, write, "weights"),
        route("/unload_lora_adapter", weights.unload_adapter, write, "weights"),
        route("/get_weight_version", info.weight_version, read, "read"),
        route("/weight_version", info.weight_version, read, "read"),
        route("/get_model_info", info.model_info, read, "read"),
        route("/model_info", info.model_info, read, "read"),
        route("/get_server_info", info.server_info, read, "read"),
        route("/server_info", info.server_info, read, "read"),
        route("/v1/loads", info.loads, read, "read"),
        route("/get_load", info.load, read, "read"),
        route("/health", info.health, read, "nothing"),
        route("/health_generate", info.health_generate, read, "generate"),
        route("/release_memory_occupation", weights.release_memory, write, "weights"),
        route("/resume_memory_occupation", weights.resume_memory, write, "weights"),
    ]
    effects = [
        ("/flush_cache", info.flush_cache),
        ("/release_memory_occupation", weights.release_memory),
        ("/resume_memory_occupation", weights.resume_memory),
    ]
    return routes + [
        route(path, not_for_pages(effect, services.measures), read, "weights")
        for path, effect in effects[: _NUM_EFFECTS[gateway.effects_by_get]]
    ]


__all__ = ["sglang_routes"]
