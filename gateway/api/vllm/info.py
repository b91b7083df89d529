"""vLLM's calls about the server and the weights in place."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

from ....config import RequestError, split_role
from ....pipeline.health import living_first
from ...call import Call
from ...caller import shown_path
from ...server.http import JsonResponse, Response, read_object
from ...serving.fields import read_part, read_query
from ...serving.services import Services
from .bodies import CheckerBody, ServerInfoQuery, WorldSizeQuery

_MOST_ADAPTER_RANK = 512
"""What vLLM's `max_lora_rank` may be at most; adapters here have any rank."""


def asks_vllm(call: Call) -> bool:
    """Return whether a call of `/server_info` is vLLM's: SGLang's has no `config_format`."""
    return "config_format" in call.query


class ServerCalls:
    """The endpoints."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._client = services.client
        self._config = services.config
        self._submissions = services.submissions

    async def world_size(self, call: Call) -> Response:
        """Return the ranks of all executors, which a group of theirs and the trainer has besides
        the trainer; without `include_dp` those of one executor."""
        every = read_query(call, WorldSizeQuery).include_dp
        ranks = await self._ranks()
        return JsonResponse({"world_size": sum(ranks) if every else max(ranks)})

    async def server_info(self, call: Call) -> Response:
        """Return the parts of vLLM's configuration that trainers read."""
        as_text = read_query(call, ServerInfoQuery).config_format == "text"
        engine, ranks = self._config.engine, await self._ranks()
        facts = await self._facts()
        dtype = facts.get("dtype")
        config: dict[str, Any] = {
            "model_config": {
                "model": shown_path(call.caller, str(engine.model_folder)),
                "served_model_name": engine.model_name,
                "dtype": f"torch.{dtype}" if dtype else None,
                "max_model_len": await self._services.length.get(),
                "quantization": facts.get("quantization") or None,
                "seed": engine.seed,
                # Logprobs are of the policy that tokens are sampled from.
                "logprobs_mode": "processed_logprobs",
            },
            "parallel_config": {
                "tensor_parallel_size": engine.tensor_parallel,
                "pipeline_parallel_size": engine.pipeline_parallel,
                "data_parallel_size": len(ranks),
                "world_size": max(ranks),
                "world_size_across_dp": sum(ranks),
            },
            "cache_config": {
                "block_size": engine.block_size,
                "enable_prefix_caching": True,
            },
            "scheduler_config": {"max_num_batched_tokens": engine.max_tokens_per_batch},
            "lora_config": {
                "max_lora_rank": _MOST_ADAPTER_RANK,
                "max_loras": engine.max_adapters,
                "max_cpu_loras": engine.max_adapters,
            },
            "weight_transfer_config": {"backend": self._backend(facts)},
        }
        return JsonResponse(
            {
                "vllm_config": repr(config) if as_text else config,
                "vllm_env": {},
                "system_env": {
                    "python_version": platform.python_version(),
                    "nano_inference_version": metadata.version("nano-inference"),
                },
            }
        )

    async def load(self, call: Call) -> Response:
        """Return the number of this gateway's requests, waiting ones included."""
        return JsonResponse(
            {"server_load": self._submissions.in_flight + self._submissions.waiting}
        )

    async def weight_info(self, call: Call) -> Response:
        """Return the name of the oldest weights in place, and the state of updates."""
        version = await self._client.weight_version()
        await self._services.labels.refresh()
        state = await self._services.weight_sync.refresh()
        return JsonResponse(
            {
                "weight_version": self._services.labels.of(version),
                "version": version,
                "update": {
                    "open": state.session,
                    "parts": state.parts,
                    "failure": state.failure or None,
                    "decided_version": state.committed or None,
                },
            }
        )

    async def weight_checker(self, call: Call) -> Response:
        """Return checksums of the weights in place, or compare them with a baseline."""
        body = read_part(
            await read_object(call, self._config.gateway.max_weights_bytes), CheckerBody
        )
        if body.action == "reset":
            raise RequestError(
                "weights are not set to zero here; to see that an update brings all of them, "
                "compare checksums before and after it",
                code="unsupported",
            )
        if body.action == "compare" and body.baseline is None:
            raise RequestError("action 'compare' needs a baseline, as 'checksum' returns it")
        checksums = await self._client.weight_checksums()
        if body.action == "checksum":
            return JsonResponse({"checksums": checksums})
        baseline = body.baseline or {}
        mismatches = sorted(
            name
            for name in checksums.keys() | baseline.keys()
            if checksums.get(name) != baseline.get(name)
        )
        return JsonResponse({"match": not mismatches, "mismatches": mismatches})

    async def _ranks(self) -> list[int]:
        """Return the number of ranks of each executor; of the settings while none has reported."""
        found = [int(load.get("ranks", 1)) for load in await self._executors()]
        engine = self._config.engine
        return found or [engine.tensor_parallel * engine.pipeline_parallel]

    async def _facts(self) -> dict[str, Any]:
        return max(await self._executors(), key=len, default={})

    async def _executors(self) -> list[dict[str, Any]]:
        """Return the loads that executors report, the newest of each."""
        newest: dict[tuple[str, str], dict[str, Any]] = {}
        for report in living_first(await self._client.deployment.reports()):
            if split_role(report.stage)[0] == "executor":
                newest.setdefault((report.lane, report.stage), dict(report.load))
        return list(newest.values())

    @staticmethod
    def _backend(facts: dict[str, Any]) -> str:
        return "nccl" if str(facts.get("device", "")).startswith("cuda") else "gloo"
