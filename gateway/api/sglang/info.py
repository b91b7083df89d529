"""SGLang's calls about the server itself: health, load, settings; aborting and flushing."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterable
from contextlib import aclosing
from importlib import metadata
from typing import Any, ClassVar

import anyio
import msgspec

from ....bus.public import Completion, EmbedParams, ErrorInfo, GenerateRequest
from ....config import NanoInferenceError, RequestError, SamplingParams, split_role
from ....pipeline.health import living_first
from ....store.board import StageReport
from ...call import Call
from ...caller import Caller, shown_path
from ...server.http import EngineError, JsonResponse, PlainTextResponse, Response, connected
from ...serving.fields import read_part
from ...serving.lane_state import DRAINING
from ...serving.services import Services
from .requests import read_sglang_object

# The token that /health_generate continues; every vocabulary has it.
_PROBE = (0,)


class AbortBody(msgspec.Struct, frozen=True):
    """`/abort_request`: AbortReq."""

    NEUTRAL: ClassVar = dict.fromkeys(
        ("finished_reason", "abort_message"), "the answer has a reason and a text of its own"
    )

    rid: str = ""
    abort_all: bool = False


class ServerInfoCalls:
    """The endpoints."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._client = services.client
        self._config = services.config
        self._submissions = services.submissions
        self._sync = services.weight_sync
        self._labels = services.labels
        services.readiness.consider(self._released)

    async def health(self, call: Call) -> Response:
        """Answer 200 if some lane works, and has weights and memory."""
        if trouble := await self._services.readiness.trouble():
            raise NanoInferenceError(trouble, code="not_ready")
        return Response()

    async def health_generate(self, call: Call) -> Response:
        """Answer 200 if a token comes; while generation is off, if the executors answer."""
        if self._services.readiness.draining:
            raise NanoInferenceError(DRAINING, code="not_ready", remedy="call another one")
        try:
            async with connected(call.cancelled):
                with anyio.fail_after(self._config.gateway.health_timeout_s):
                    if self._sync.paused or self._sync.released:
                        await self._client.weight_version()
                    else:
                        await self._probe()
        except TimeoutError:
            trouble = await self._client.deployment.trouble() or "no token came in time"
            raise NanoInferenceError(trouble, code="not_ready") from None
        return Response()

    async def model_info(self, call: Call) -> Response:
        return JsonResponse(await self._model_info(call.caller))

    async def weight_version(self, call: Call) -> Response:
        return JsonResponse({"weight_version": await self._label()})

    async def server_info(self, call: Call) -> Response:
        """Names and values of SGLang's ServerArgs, where there is a counterpart."""
        config, settings = self._config, self._config.engine
        lanes = _lanes(await self._client.deployment.reports())
        executors = _loads_of(lanes, "executor")
        return JsonResponse(
            {
                **await self._model_info(call.caller),
                "served_model_name": settings.model_name,
                "version": metadata.version("nano-inference"),
                "host": config.gateway.host,
                "port": config.gateway.port,
                **_model_facts(executors),
                "random_seed": settings.seed,
                "context_length": await self._services.length.get(),
                "max_running_requests": _sum(executors, "max_batch_size") or None,
                "max_prefill_tokens": settings.max_tokens_per_batch,
                "max_total_num_tokens": _sum(_loads_of(lanes, "batching"), "kv_total")
                * settings.block_size,
                "page_size": settings.block_size,
                "enable_deterministic_inference": bool(executors)
                and all(load.get("deterministic") for load in executors),
                "enable_memory_saver": True,
                "disaggregation_mode": "null",
                "dp_size": len(lanes) or 1,
                "tp_size": settings.tensor_parallel,
                "pp_size": settings.pipeline_parallel,
                "ep_size": settings.expert_parallel,
                **dict.fromkeys(("nnodes", "gpu_id_step"), 1),
                **dict.fromkeys(("node_rank", "base_gpu_id"), 0),
                "internal_states": [_load(rank, lane) for rank, lane in enumerate(lanes)],
            }
        )

    async def loads(self, call: Call) -> Response:
        """Return the running and waiting requests of each lane; requests of this gateway that no
        lane has reported count too."""
        loads = await self._loads()
        return JsonResponse(
            {
                "dp_rank_count": len(loads),
                "version": metadata.version("nano-inference"),
                "loads": loads,
            }
        )

    async def workers(self, call: Call) -> Response:
        """Return the servers behind this address, as SGLang's router does: this one."""
        host = dict(call.headers).get(b"host", b"").decode("latin-1")
        worker = {
            "id": host,
            "url": f"{call.scheme}://{host}",
            "model_id": self._config.engine.model_name,
            "worker_type": "regular",
            "is_healthy": not await self._services.readiness.trouble(),
        }
        return JsonResponse({"workers": [worker], "total": 1})

    async def load(self, call: Call) -> Response:
        """Return the same as `loads`, in SGLang's older form."""
        return JsonResponse(await self._loads())

    async def flush_cache(self, call: Call) -> Response:
        """Flush the cache. Running requests keep their own KV, which SGLang does not allow."""
        await self._client.flush_cache()
        return PlainTextResponse("Cache flushed.\n")

    async def abort_request(self, call: Call) -> Response:
        found = await read_sglang_object(call, self._config)
        body = read_part(found, AbortBody)
        caller = call.caller
        if not (body.abort_all or body.rid):
            raise RequestError("give rid, or abort_all")
        if "weights" not in caller.scopes:
            own = not body.abort_all
            if not (own and await self._submissions.abort_own(caller, body.rid)):
                raise RequestError(
                    "without the scope 'weights' a key may abort requests of its own tenant, by "
                    "models that the key is for, in flight at this gateway; this is none",
                    code="insufficient_scope",
                )
        elif body.abort_all:
            await self._submissions.abort_all()
        else:
            await self._submissions.abort(caller, body.rid)
        return Response()

    def _released(self) -> str:
        released = ", ".join(sorted(self._sync.released))
        return released and f"nothing can be generated: {released} released; resume the memory"

    async def _probe(self) -> None:
        """Raises EngineError: there is no token, nor a vector from a model that only embeds."""
        error = await self._probed(SamplingParams(max_tokens=1, temperature=0.0))
        if error is not None and error.code == "cannot_generate":
            error = await self._probed(SamplingParams(), EmbedParams())
        if error is not None:
            raise EngineError(error.message, code="not_ready")

    async def _probed(
        self, sampling: SamplingParams, embed: EmbedParams | None = None
    ) -> ErrorInfo | None:
        """Return the error of the smallest request."""
        request = GenerateRequest(
            request_id=f"health-{uuid.uuid4().hex}",
            prompt_token_ids=_PROBE,
            sampling=sampling,
            embed=embed,
            stream=False,
            # Before waiting requests, without preemption.
            priority=max(0, self._config.fairness.high_priority_threshold - 1),
        )
        async with aclosing(self._client.submit(request)) as outputs:
            async for output in outputs:
                if isinstance(output, Completion):
                    return output.error
        return None

    async def _label(self) -> str:
        return self._labels.of(await self._client.weight_version())

    async def _model_info(self, caller: Caller) -> dict[str, Any]:
        folder = shown_path(caller, str(self._config.engine.model_folder))
        return {
            "model_path": folder,
            "tokenizer_path": folder,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": await self._label(),
        }

    async def _loads(self) -> list[dict[str, Any]]:
        loads = [
            _load(*each) for each in enumerate(_lanes(await self._client.deployment.reports()))
        ]
        reported = sum(load["num_reqs"] for load in loads)
        # Lanes report once a second, and without the requests that wait here.
        missing = max(0, self._submissions.in_flight - reported) + self._submissions.waiting
        if loads and missing:
            for name in ("num_waiting_reqs", "num_reqs", "num_total_reqs"):
                loads[0][name] += missing
        return loads


Lane = dict[str, StageReport]
"""The newest report of each role."""

Load = dict[str, int | float | str]


def _lanes(reports: list[StageReport]) -> list[Lane]:
    lanes: dict[str, Lane] = defaultdict(dict)
    for report in living_first(reports):
        lanes[report.lane].setdefault(report.stage, report)
    return list(lanes.values())


def _loads_of(lanes: Iterable[Lane], stage: str) -> list[Load]:
    """Return the loads that all replicas of a stage report."""
    reports = [each for lane in lanes for each in lane.items()]
    return [report.load for role, report in reports if split_role(role)[0] == stage]


def _sum(loads: Iterable[Load], name: str) -> int:
    return sum(int(load.get(name, 0)) for load in loads)


def _model_facts(executors: list[Load]) -> dict[str, Any]:
    """Return the model and device that executors report, null if unknown.

    SGLang has names for the first two alone.
    """
    first = max(executors, key=len, default={})
    experts = first.get("experts")
    return {
        "device": str(first.get("device", "")).partition(" ")[0].partition(":")[0] or None,
        "dtype": first.get("dtype"),
        "quantization": first.get("quantization") or None,
        "is_moe": None if experts is None else bool(experts),
        "n_experts": experts,
        "n_active_experts": first.get("active_experts"),
        **{name: first.get(name) for name in ("parameters", "vocab_size", "load_ns")},
        **{name: _sum(executors, name) or None for name in ("weight_bytes", "kv_bytes")},
    }


def _load(rank: int, lane: Lane) -> dict[str, Any]:
    """Return a lane's load, as that of a data-parallel rank. Sequences count as running."""
    running = _sum(_loads_of([lane], "batching"), "running")
    total = max(running, _sum(_loads_of([lane], "admission"), "in_flight"))
    return {
        "dp_rank": rank,
        "num_reqs": total,
        "num_total_reqs": total,
        "num_running_reqs": running,
        "num_waiting_reqs": total - running,
    }
