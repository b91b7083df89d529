"""vLLM's control plane for RL trainers; docs/vllm.md lists it.

vLLM's routes for generation are OpenAI's, with its additions.
"""

from __future__ import annotations

from ...serving.services import Services
from ..routes import PolicyRoute, RouteFor
from .errors import is_called, respond
from .info import ServerCalls, asks_vllm
from .weights import WeightCalls


def vllm_routes(services: Services) -> list[PolicyRoute]:
    """Return the endpoints. Those for some calls of a path come before SGLang's."""
    weights, server = WeightCalls(services), ServerCalls(services)
    return [
        PolicyRoute("POST /pause", "weights", weights.pause),
        PolicyRoute("POST /resume", "weights", weights.resume),
        PolicyRoute("GET /is_paused", "read", weights.is_paused),
        PolicyRoute("POST /abort_requests", "weights", weights.abort_requests),
        PolicyRoute("GET /get_world_size", "read", server.world_size),
        RouteFor("GET /server_info", "read", server.server_info, asks_vllm),
        PolicyRoute("GET /load", "read", server.load),
        PolicyRoute("POST /init_weight_transfer_engine", "weights", weights.init_engine),
        PolicyRoute("POST /shutdown_weight_transfer_engine", "weights", weights.shut_down_engine),
        PolicyRoute("POST /init_broadcaster", "weights", weights.init_broadcaster),
        PolicyRoute("POST /collective_rpc", "weights", weights.rpc),
        PolicyRoute("POST /start_weight_update", "weights", weights.start),
        PolicyRoute("POST /start_draft_weight_update", "weights", weights.start_draft),
        PolicyRoute("POST /update_weights", "weights", weights.update),
        PolicyRoute("POST /finish_weight_update", "weights", weights.finish),
        PolicyRoute("GET /weight_info", "read", server.weight_info),
        PolicyRoute("POST /weight_checker", "weights", server.weight_checker),
        PolicyRoute("POST /sleep", "weights", weights.sleep),
        PolicyRoute("POST /wake_up", "weights", weights.wake_up),
        PolicyRoute("GET /is_sleeping", "read", weights.is_sleeping),
        PolicyRoute("POST /release_kv_cache_memory", "weights", weights.release_kv_cache),
        PolicyRoute("POST /reset_prefix_cache", "weights", weights.reset_cache),
        PolicyRoute("POST /reset_mm_cache", "weights", weights.reset_encoder_cache),
        PolicyRoute("POST /reset_encoder_cache", "weights", weights.reset_encoder_cache),
    ]


__all__ = ["is_called", "respond", "vllm_routes"]
