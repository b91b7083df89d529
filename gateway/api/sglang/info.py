"""SGLang's calls about the server itself: health, load, what it serves; aborting and flushing."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Mapping
from contextlib import aclosing
from importlib import metadata
from typing import Any, ClassVar

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ....bus.public import Completion, EmbedParams, ErrorInfo, GenerateRequest
from ....config import Config, NanoInferenceError, RequestError, SamplingParams, split_role
from ....pipeline.client import BusClient
from ....pipeline.health import living_first
from ....store.board import StageReport
from ...policy.caller import caller_of
from ...server.http import EngineError, JsonResponse, answer_while_connected
from ...serving.fields import read_part
from ...serving.lane_state import DRAINING, ModelLength, Readiness
from ...serving.submissions import Submissions
from .fields import read_sglang_object
from .labels import VersionLabels
from .sync import WeightSync

# The token that /health_generate continues; every vocabulary has it.
_PROBE = (0,)


class AbortBody(msgspec.Struct, frozen=True):
    """AbortReq."""

    HARMLESS: ClassVar = frozenset({"finished_reason", "abort_message"})

    rid: str = ""
    abort_all: bool = False


class InfoCalls:
    """The endpoints."""

    def __init__(
        self,
        engine: BusClient,
        config: Config,
        submissions: Submissions,
        sync: WeightSync,
        labels: VersionLabels,
        readiness: Readiness,
        length: ModelLength,
    ) -> None:
        self._engine = engine
        self._config = config
        self._submissions = submissions
        self._sync = sync
        self._labels = labels
        self._readiness = readiness
        self._length = length
        readiness.consider(self._released)

    async def health(self, request: Request) -> Response:
        """Whether some lane says that it works, and lacks neither weights nor memory."""
        if trouble := await self._readiness.trouble():
            raise NanoInferenceError(trouble, code="not_ready")
        return Response()

    async def health_generate(self, request: Request) -> Response:
        """Whether a token comes out; while that can't be, whether the executors answer."""
        if self._readiness.draining:
            raise NanoInferenceError(DRAINING, code="not_ready")

        async def work() -> Response:
            with anyio.fail_after(self._config.gateway.health_timeout_s):
                if self._sync.paused or self._sync.released:
                    await self._engine.weight_version()
                else:
                    await self._probe()
            return Response()

        try:
            return await answer_while_connected(request, work)
        except TimeoutError:
            trouble = await self._engine.trouble() or "no token came in time"
            raise NanoInferenceError(trouble, code="not_ready") from None

    async def model_info(self, request: Request) -> Response:
        return JsonResponse(await self._model_info())

    async def weight_version(self, request: Request) -> Response:
        return JsonResponse({"weight_version": await self._label()})

    async def server_info(self, request: Request) -> Response:
        """Names and values as SGLang's ServerArgs has them, where there is anything alike."""
        config, engine = self._config, self._config.engine
        lanes = _by_lane(await self._engine.reports())
        loads = [_load(lane, told) for lane, told in enumerate(lanes.values())]
        places = sum(_number(told, "executor", "max_batch_size") for told in lanes.values())
        blocks = sum(_number(told, "batching", "kv_total") for told in lanes.values())
        return JsonResponse(
            {
                **await self._model_info(),
                "served_model_name": engine.model_name,
                "version": metadata.version("nano-inference"),
                "host": config.gateway.host,
                "port": config.gateway.port,
                **_model_facts(lanes),
                "random_seed": engine.seed,
                "context_length": await self._length.get(),
                "max_running_requests": places or None,
                "max_prefill_tokens": engine.max_tokens_per_batch,
                "max_total_num_tokens": blocks * engine.block_size,
                "page_size": engine.block_size,
                "enable_deterministic_inference": _is_deterministic(lanes),
                "enable_memory_saver": True,
                "disaggregation_mode": "null",
                "tp_size": 1,
                "dp_size": len(lanes) or 1,
                "pp_size": 1,
                "ep_size": 1,
                "nnodes": 1,
                "node_rank": 0,
                "base_gpu_id": 0,
                "gpu_id_step": 1,
                "internal_states": loads,
            }
        )

    async def loads(self, request: Request) -> Response:
        """What runs and waits, by lane; requests of this gateway that no lane tells of count."""
        loads = await self._loads()
        return JsonResponse(
            {"dp_rank_count": len(loads), "version": metadata.version("nano-inference")}
            | {"loads": loads}
        )

    async def load(self, request: Request) -> Response:
        """The same as SGLang had it before `/v1/loads`."""
        return JsonResponse(await self._loads())

    async def flush_cache(self, request: Request) -> Response:
        """Unlike SGLang's it works while requests run; they keep their own KV."""
        await self._engine.flush_cache()
        return PlainTextResponse("Cache flushed.\n")

    async def abort_request(self, request: Request) -> Response:
        found = await read_sglang_object(request, self._config)
        body = read_part(found, AbortBody)
        caller = caller_of(request)
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
            await self._submissions.abort(body.rid)
        return Response()

    def _released(self) -> str:
        released = ", ".join(sorted(self._sync.released))
        return released and f"nothing can be generated: {released} released; resume the memory"

    async def _probe(self) -> None:
        """Raises EngineError when no token comes, nor a vector of a model that makes only those."""
        error = await self._probed(SamplingParams(max_tokens=1, temperature=0.0))
        if error is not None and error.code == "cannot_generate":
            error = await self._probed(SamplingParams(), EmbedParams())
        if error is not None:
            raise EngineError(error.message, code="not_ready")

    async def _probed(
        self, sampling: SamplingParams, embed: EmbedParams | None = None
    ) -> ErrorInfo | None:
        """What a request ended with that asks for as little as there can be."""
        request = GenerateRequest(
            request_id=f"health-{uuid.uuid4().hex}",
            prompt_token_ids=_PROBE,
            sampling=sampling,
            embed=embed,
            stream=False,
            # Before what waits, but never in the place of what runs.
            priority=max(0, self._config.fairness.high_priority_threshold - 1),
        )
        async with aclosing(self._engine.submit(request)) as outputs:
            async for output in outputs:
                if isinstance(output, Completion):
                    return output.error
        return None

    async def _label(self) -> str:
        return self._labels.of(await self._engine.weight_version())

    async def _model_info(self) -> dict[str, Any]:
        folder = str(self._config.engine.model_folder)
        return {
            "model_path": folder,
            "tokenizer_path": folder,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": await self._label(),
        }

    async def _loads(self) -> list[dict[str, Any]]:
        lanes = _by_lane(await self._engine.reports())
        loads = [_load(lane, told) for lane, told in enumerate(lanes.values())]
        told = sum(load["num_reqs"] for load in loads)
        # The lanes tell once a second; what is in flight here is known at once. They don't know of
        # what waits here.
        missing = max(0, self._submissions.in_flight - told) + self._submissions.waiting
        if loads and missing:
            loads[0]["num_waiting_reqs"] += missing
            loads[0]["num_reqs"] += missing
            loads[0]["num_total_reqs"] += missing
        return loads


Told = dict[str, StageReport]


def _by_lane(reports: list[StageReport]) -> dict[str, Told]:
    lanes: dict[str, Told] = defaultdict(dict)
    for report in living_first(reports):
        lanes[report.lane].setdefault(report.stage, report)
    return lanes


def _model_facts(lanes: Mapping[str, Told]) -> dict[str, Any]:
    """What the executors tell of their model and device, null where none has.

    SGLang has names for the first two alone.
    """
    loads = _executor_loads(lanes)
    first = max(loads, key=len, default={})
    experts = first.get("experts")
    return {
        "device": str(first.get("device", "")).partition(" ")[0].partition(":")[0] or None,
        "dtype": first.get("dtype"),
        "is_moe": None if experts is None else bool(experts),
        "n_experts": experts,
        "n_active_experts": first.get("active_experts"),
        **{name: first.get(name) for name in ("parameters", "vocab_size", "load_ns")},
        # Of all replicas together.
        **{
            name: sum(int(load.get(name, 0)) for load in loads) or None
            for name in ("weight_bytes", "kv_bytes")
        },
    }


def _executor_loads(lanes: Mapping[str, Told]) -> list[dict[str, int | float | str]]:
    told = [role for lane in lanes.values() for role in lane.items()]
    return [report.load for role, report in told if split_role(role)[0] == "executor"]


def _is_deterministic(lanes: Mapping[str, Told]) -> bool:
    """Whether all executors are, of which there is one."""
    loads = _executor_loads(lanes)
    return bool(loads) and all(load.get("deterministic") for load in loads)


def _number(told: Told, stage: str, name: str) -> int:
    """Of all replicas together."""
    loads = [report.load for role, report in told.items() if split_role(role)[0] == stage]
    return sum(int(load.get(name, 0)) for load in loads)


def _load(rank: int, told: Told) -> dict[str, Any]:
    """A lane, in SGLang's words a data-parallel rank. Running ones are counted as sequences."""
    running = _number(told, "batching", "running")
    total = max(running, _number(told, "admission", "in_flight"))
    return {
        "dp_rank": rank,
        "num_reqs": total,
        "num_total_reqs": total,
        "num_running_reqs": running,
        "num_waiting_reqs": total - running,
    }
