"""The HTTP interface that RL trainers expect of an SGLang server; docs/gateway.md lists it."""

from __future__ import annotations

from starlette.routing import Route

from ...config import Config
from ...pipeline.client import BusClient
from ..callers import Endpoint, not_for_pages
from ..measures import Measures
from ..model_length import ModelLength
from ..readiness import Readiness
from ..submissions import Submissions
from ..words import LazyWords
from .generate import Generation
from .info import InfoCalls
from .labels import VersionLabels
from .sync import WeightSync
from .weights import WeightCalls

# Of the calls with effects that SGLang takes by GET as well, the first ones are.
_NUM_EFFECTS = {"none": 0, "flush_cache": 1, "all": 3}


def sglang_routes(
    engine: BusClient,
    config: Config,
    words: LazyWords,
    submissions: Submissions,
    measures: Measures,
    readiness: Readiness,
    length: ModelLength,
) -> list[Route]:
    """Its endpoints."""
    labels = VersionLabels()
    sync = WeightSync(engine, labels, config.gateway.sync_timeout_s)
    generation = Generation(submissions, config, words, labels)
    info = InfoCalls(engine, config, submissions, sync, labels, readiness, length)
    weights = WeightCalls(engine, config.gateway, sync)
    read, write = ["GET"], ["POST"]
    routes = [
        Route("/generate", generation.generate, methods=["POST", "PUT"]),
        Route("/abort_request", info.abort_request, methods=write),
        Route("/flush_cache", info.flush_cache, methods=write),
        Route("/pause_generation", weights.pause, methods=write),
        Route("/continue_generation", weights.resume, methods=write),
        Route("/init_weights_update_group", weights.init_group, methods=write),
        Route("/destroy_weights_update_group", weights.destroy_group, methods=write),
        Route("/begin_weight_update", weights.begin, methods=write),
        Route("/end_weight_update", weights.end, methods=write),
        Route("/update_weights_from_disk", weights.from_disk, methods=write),
        Route("/update_weights_from_distributed", weights.from_distributed, methods=write),
        Route("/update_weights_from_tensor", weights.from_tensor, methods=write),
        Route("/update_weight_version", weights.rename, methods=write),
        Route("/get_weight_version", info.weight_version, methods=read),
        Route("/weight_version", info.weight_version, methods=read),
        Route("/get_model_info", info.model_info, methods=read),
        Route("/model_info", info.model_info, methods=read),
        Route("/get_server_info", info.server_info, methods=read),
        Route("/server_info", info.server_info, methods=read),
        Route("/v1/loads", info.loads, methods=read),
        Route("/get_load", info.load, methods=read),
        Route("/health", info.health, methods=read),
        Route("/health_generate", info.health_generate, methods=read),
        Route("/release_memory_occupation", weights.release_memory, methods=write),
        Route("/resume_memory_occupation", weights.resume_memory, methods=write),
    ]
    effects: list[tuple[str, Endpoint]] = [
        ("/flush_cache", info.flush_cache),
        ("/release_memory_occupation", weights.release_memory),
        ("/resume_memory_occupation", weights.resume_memory),
    ]
    taken = effects[: _NUM_EFFECTS[config.gateway.effects_by_get]]
    return routes + [
        Route(path, not_for_pages(effect, measures), methods=read) for path, effect in taken
    ]


__all__ = ["sglang_routes"]
