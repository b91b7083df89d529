"""The HTTP interface that RL trainers expect of an SGLang server; docs/gateway.md lists it."""

from __future__ import annotations

from functools import partial

from ...server.callers import not_for_pages
from ...serving.services import Services
from ..routes import PolicyRoute
from .generate import Generation, encode
from .info import ServerInfoCalls
from .weights import WeightCalls

# The first of `effects` may be called by GET as well, as SGLang allows.
_NUM_EFFECTS = {"none": 0, "flush_cache": 1, "all": 3}


def sglang_routes(services: Services) -> list[PolicyRoute]:
    """Return the endpoints."""
    gateway = services.config.gateway
    generation = Generation(services)
    info = ServerInfoCalls(services)
    weights = WeightCalls(services)
    routes = [
        PolicyRoute("POST,PUT /generate", "generate", generation.generate),
        PolicyRoute("POST,PUT /encode", "generate", partial(encode, services)),
        PolicyRoute("POST /abort_request", "generate", info.abort_request),
        PolicyRoute("POST /flush_cache", "weights", info.flush_cache),
        PolicyRoute("POST /pause_generation", "weights", weights.pause),
        PolicyRoute("POST /continue_generation", "weights", weights.resume),
        PolicyRoute("POST /init_weights_update_group", "weights", weights.init_group),
        PolicyRoute("POST /destroy_weights_update_group", "weights", weights.destroy_group),
        PolicyRoute("POST /begin_weight_update", "weights", weights.begin),
        PolicyRoute("POST /end_weight_update", "weights", weights.end),
        PolicyRoute("POST /update_weights_from_disk", "weights", weights.from_disk),
        PolicyRoute("POST /update_weights_from_distributed", "weights", weights.from_distributed),
        PolicyRoute("POST /update_weights_from_tensor", "weights", weights.from_tensor),
        PolicyRoute("POST /pull_weights", "weights", weights.pull),
        PolicyRoute("POST /update_weight_version", "weights", weights.rename),
        PolicyRoute("POST /load_lora_adapter", "weights", weights.load_adapter),
        PolicyRoute("POST /unload_lora_adapter", "weights", weights.unload_adapter),
        PolicyRoute("GET /get_weight_version", "read", info.weight_version),
        PolicyRoute("GET /weight_version", "read", info.weight_version),
        PolicyRoute("GET /get_model_info", "read", info.model_info),
        PolicyRoute("GET /model_info", "read", info.model_info),
        PolicyRoute("GET /get_server_info", "read", info.server_info),
        PolicyRoute("GET /server_info", "read", info.server_info),
        PolicyRoute("GET /v1/loads", "read", info.loads),
        PolicyRoute("GET /workers", "read", info.workers),
        PolicyRoute("GET /get_load", "read", info.load),
        PolicyRoute("GET /health", "nothing", info.health),
        PolicyRoute("GET /health_generate", "generate", info.health_generate),
        PolicyRoute("POST /release_memory_occupation", "weights", weights.release_memory),
        PolicyRoute("POST /resume_memory_occupation", "weights", weights.resume_memory),
    ]
    effects = [
        ("/flush_cache", info.flush_cache),
        ("/release_memory_occupation", weights.release_memory),
        ("/resume_memory_occupation", weights.resume_memory),
    ]
    return routes + [
        PolicyRoute(f"GET {path}", "weights", not_for_pages(effect, services.measures))
        for path, effect in effects[: _NUM_EFFECTS[gateway.effects_by_get]]
    ]


__all__ = ["sglang_routes"]
