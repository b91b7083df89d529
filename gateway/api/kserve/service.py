"""The models of a gateway, called the same way from every transport."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, NamedTuple, Protocol

import msgspec

from ....config import ConfigError, NanoInferenceError, RequestError, shown
from ....kserve.parameters import BILLED_PARAM, KEY_PARAM, budget_of, time_param
from ....kserve.tensors import (
    InferRequest,
    InferResponse,
    ModelSpec,
    ModelState,
    NamedTensor,
    Parameters,
    RequestedOutput,
    TensorError,
    raw_bytes,
)
from ....telemetry import Metrics, instruments, names, now_ns
from ...call import Account, Call
from ...caller import ANYBODY, Caller
from ...serving.begun_calls import identity_of, key_of
from ...serving.durable_calls import IdempotencyKey
from ...serving.lane_state import Readiness
from ...serving.submissions import in_time
from ...serving.times import call_usage
from .regions import TenantRegions
from .served import ModelCall, ServedModel

# Beyond its deadline a call may still report how far the engine came.
_GRACE_S = 0.1

Respond = Callable[[InferResponse], Awaitable[None]]


class ModelRepository(Protocol):
    """Loads and unloads models."""

    async def load(self, call: Call, model: str) -> object:
        """Load a model for a call. Raises NanoInferenceError if that fails."""

    async def unload(self, call: Call, model: str) -> object:
        """Unload a model. Raises as `load`."""


# --- statistics -----------------------------------------------------------------------------------

_STATS = (
    *("success", "fail", "queue", "compute_input", "compute_infer", "compute_output"),
    *("cache_hit", "cache_miss"),
)


class ModelStatistics:
    """Calls of one model since the gateway was started.

    Attributes:
        stats: Count and total time by the fields of Triton's InferStatistics. Of successful calls
            `queue` is the time before any computation, and `compute_infer` the time after that.
            The other fields stay zero: tensors are read and written while others are computed.
        last_ns: Arrival of the last call, since the Unix epoch; 0 before the first.
    """

    def __init__(self) -> None:
        self.stats = {name: {"count": 0, "ns": 0} for name in _STATS}
        self.last_ns = 0

    def add(self, total_ns: int, compute_ns: int | None, *, failed: bool = False) -> None:
        """Record the end of a call.

        Args:
            total_ns: Its duration.
            compute_ns: The computed part; None for all of it.
            failed: It has failed.
        """
        total_ns = max(0, total_ns)
        computed_ns = total_ns if compute_ns is None else min(compute_ns, total_ns)
        durations = {"success": total_ns, "queue": total_ns - computed_ns}
        durations["compute_infer"] = computed_ns
        for name, ns in ({"fail": total_ns} if failed else durations).items():
            self.stats[name]["count"] += 1
            self.stats[name]["ns"] += ns

    def to_json(self, name: str, version: str) -> dict[str, Any]:
        """Return the fields of Triton's ModelStatistics."""
        return {
            "name": name,
            "version": version,
            "last_inference": self.last_ns // 1_000_000,
            "inference_count": self.stats["success"]["count"],
            "execution_count": self.stats["success"]["count"],
            "inference_stats": self.stats,
            "batch_stats": [],
        }


class Statistics:
    """Calls of all models of a gateway."""

    def __init__(self, metrics: Metrics) -> None:
        """Args: `metrics` records calls, too."""
        self._models: dict[str, ModelStatistics] = {}
        self._metrics = metrics

    def model(self, name: str) -> ModelStatistics:
        """Return a model's statistics."""
        return self._models.setdefault(name, ModelStatistics())

    @contextmanager
    def measured(self, name: str, call: ModelCall) -> Iterator[None]:
        """Record a call of a model."""
        found, begun_ns = self.model(name), now_ns()
        found.last_ns = begun_ns
        failure = "cancelled"
        try:
            yield
            failure = ""
        except NanoInferenceError as error:
            failure = error.code
            raise
        except Exception:
            failure = "internal_error"
            raise
        finally:
            total_ns = now_ns() - begun_ns
            found.add(total_ns, call.compute_ns, failed=bool(failure))
            labels = {names.REQUEST_MODEL: name, names.ERROR_TYPE: failure}
            self._metrics.record(instruments.MODEL_CALL_DURATION, total_ns / 1e9, labels)


# --- models ---------------------------------------------------------------------------------------


class InferenceService:
    """The models of a gateway.

    Attributes:
        statistics: Statistics of all calls.
    """

    def __init__(self, metrics: Metrics) -> None:
        """Args: `metrics` records calls beside the statistics."""
        self._models: dict[str, ServedModel] = {}
        self._aliases: dict[str, str] = {}
        self.statistics = Statistics(metrics)

    def add(self, model: ServedModel, aliases: Iterable[str] = ()) -> None:
        """Serve a model, also under its aliases.

        Raises:
            ConfigError: One of the names is taken.
        """
        name = model.spec.name
        for each in (name, *aliases):
            if each in self._models or each in self._aliases:
                raise ConfigError(
                    f"there are two models {each!r}; give one of them another name, or leave it "
                    "out of gateway.models"
                )
        self._models[name] = model
        self._aliases.update(dict.fromkeys(aliases, name))

    def remove(self, name: str) -> None:
        """Stop serving a model, if there is one of that name. Calls in flight go on."""
        if self._models.pop(name, None) is not None:
            self._aliases = {alias: of for alias, of in self._aliases.items() if of != name}

    @property
    def models(self) -> list[tuple[ServedModel, list[str]]]:
        """All models, each with its aliases."""
        return [
            (model, [alias for alias, of in self._aliases.items() if of == name])
            for name, model in self._models.items()
        ]

    def specs(self, name: str = "", version: str = "", caller: Caller = ANYBODY) -> list[ModelSpec]:
        """Return the models that a caller may use, or only the one of a name. Raises as `spec`."""
        if name:
            return [self.spec(name, version, caller)]
        return [each.spec for each in self._models.values() if _allows(caller, each.spec)]

    def spec(self, name: str, version: str = "", caller: Caller = ANYBODY) -> ModelSpec:
        """Return a model's interface.

        Raises:
            RequestError: model_not_found: there is no such model, or the caller may not use it.
        """
        return self._model(name, version, caller).spec

    async def trouble(self, name: str, version: str = "") -> str:
        """Return why a request would not be served now; "" if it would. Raises BusError too."""
        return await self._model(name, version).trouble()

    async def states(self, names: Collection[str] | None = None) -> list[ModelState]:
        """Return the states of all models, or of some. Raises BusError."""
        wanted = None if names is None else {self._aliases.get(each, each) for each in names}
        return [
            ModelState(name, version, not trouble, trouble)
            for name, model in list(self._models.items())
            if wanted is None or name in wanted
            for trouble in [await model.trouble()]
            for version in model.spec.versions
        ]

    async def infer(
        self, call: Call, request: InferRequest, respond: Respond, *, many: bool = False
    ) -> None:
        """Run a request, and pass on each response.

        Args:
            call: The caller and the call's deadline.
            request: The request; its parameters may shorten the deadline.
            respond: Takes each response, with the requested outputs in the requested order.
            many: Several responses may be sent; otherwise exactly one.

        Raises:
            NanoInferenceError: The call failed.
        """
        model = self._model(request.model_name, request.model_version, call.caller)
        spec = model.spec
        # A model that calls others keeps the name of the first one.
        call.account.model = call.account.model or spec.name
        call = copy(call)
        call.requested_model = call.requested_model or request.model_name
        _check_parameters(spec, request, many=many)
        request = msgspec.structs.replace(request, inputs=_checked_inputs(spec, request.inputs))
        requested = _requested_names(spec, request.outputs)
        _shorten(call, request.parameters)

        async def answer(outputs: Sequence[NamedTensor]) -> None:
            by_name = {each.name: each for each in outputs}
            chosen = tuple(by_name[name] for name in requested if name in by_name)
            times = time_parameters(call.account)
            await respond(
                InferResponse(model_name=spec.name, id=request.id, outputs=chosen, parameters=times)
            )

        asked = ModelCall(request, call, many=many, key=_key_of(call, request, many=many))
        with self.statistics.measured(spec.name, asked), in_time(call, "it ended", _GRACE_S):
            await model.infer(asked, answer)

    async def infer_once(self, call: Call, request: InferRequest) -> InferResponse:
        """Run a request, and return its one response. Raises as `infer`."""
        found: list[InferResponse] = []

        async def respond(response: InferResponse) -> None:
            found.append(response)

        await self.infer(call, request, respond)
        (response,) = found
        return response

    def _model(self, name: str, version: str = "", caller: Caller = ANYBODY) -> ServedModel:
        model = self._models.get(self._aliases.get(name, name))
        what = shown(name)
        if model is not None and _allows(caller, model.spec):
            if version in ("", *model.spec.versions):
                return model
            what += f" of version {shown(version)}"
        raise RequestError(
            f"there is no model {what}; the repository's index lists the models; name one of them",
            code="model_not_found",
        )


def time_parameters(account: Account) -> Parameters:
    """Return the parameters of a response with the time of its call, once all of it has ended."""
    usage = call_usage(account)
    if not usage:
        return {}
    times = {time_param(cause): spent_ns for cause, spent_ns in usage["time"].items()}
    return times | {BILLED_PARAM: usage["billed_ns"]}


class KServe(NamedTuple):
    """Everything that the interface serves.

    Attributes:
        service: The models.
        regions: Shared memory that clients have registered.
        readiness: Readiness of the gateway.
        repository: Loads and unloads models; None if there is a single, fixed one.
    """

    service: InferenceService
    regions: TenantRegions
    readiness: Readiness
    repository: ModelRepository | None = None


def _allows(caller: Caller, spec: ModelSpec) -> bool:
    """Return whether a caller's key allows a model, or the model that it forwards to."""
    return caller.models is None or (spec.allowed_as or spec.name) in caller.models


def _check_parameters(spec: ModelSpec, request: InferRequest, *, many: bool) -> None:
    """Raise RequestError for a parameter with the name of an input."""
    for tensor in spec.inputs:
        if tensor.name in request.parameters:
            advice = "; this call has one answer, so for several call ModelStreamInfer or POST "
            advice += f"/v2/models/{spec.name}/generate_stream"
            raise RequestError(
                f"{tensor.name} is an input of {spec.name}, and no parameter; send it among the "
                f"inputs as {tensor.datatype} {list(tensor.shape)}"
                + (advice if spec.decoupled and not many else "")
            )


def _checked_inputs(spec: ModelSpec, inputs: Sequence[NamedTensor]) -> tuple[NamedTensor, ...]:
    """Check and return a request's inputs.

    Raises:
        TensorError: One is missing, unknown, duplicate, or has another datatype or shape.
    """
    given: dict[str, NamedTensor] = {}
    known = {each.name: each for each in spec.inputs}
    for tensor in inputs:
        expected = known.get(tensor.name)
        if expected is None or tensor.name in given:
            raise TensorError(
                f"{spec.name} has no input {shown(tensor.name)}, or it is there twice; its inputs "
                f"are {', '.join(known)}"
            )
        fits = len(tensor.shape) == len(expected.shape) and all(
            there in (-1, here) for there, here in zip(expected.shape, tensor.shape, strict=True)
        )
        if tensor.datatype != expected.datatype or not fits:
            raise TensorError(
                f"{spec.name} takes {tensor.name} as {expected.datatype} {list(expected.shape)}, "
                f"where -1 is any number, and not as {tensor.datatype} {shown(list(tensor.shape))}"
            )
        given[tensor.name] = tensor
    for name, expected in known.items():
        if name not in given and not expected.optional:
            raise TensorError(f"{spec.name} needs the input {name}; add it")
    return tuple(given.values())


def _requested_names(spec: ModelSpec, outputs: Sequence[RequestedOutput]) -> tuple[str, ...]:
    """Return the names of the requested outputs, in the client's order; all if it names none.

    Raises:
        TensorError: The model has no such output, or it is there twice.
    """
    known = [each.name for each in spec.outputs]
    found = [each.name for each in outputs]
    for index, name in enumerate(found):
        if name not in known or name in found[:index]:
            raise TensorError(
                f"{spec.name} has no output {shown(name)}, or it is there twice; its outputs are "
                f"{', '.join(known)}"
            )
    return tuple(found or known)


def _key_of(call: Call, request: InferRequest, *, many: bool) -> IdempotencyKey | None:
    """Return the identity of a request with an idempotency key; None without one.

    Raises:
        RequestError: invalid_idempotency_key.
    """
    given = request.parameters.get(KEY_PARAM)
    key = key_of(call, *([] if given is None else [str(given)]))
    if key is None:
        return None
    tensors = [
        (each.name, each.datatype, each.shape, hashlib.sha256(raw_bytes(each)).hexdigest())
        for each in request.inputs
    ]
    said = msgspec.structs.replace(request, inputs=())
    return identity_of(call, key, msgspec.json.encode((said, tensors, many), order="deterministic"))


def _shorten(call: Call, parameters: Parameters) -> None:
    """Set the deadline of a call's request, if that is earlier."""
    budget = budget_of(parameters)
    if budget is None:
        return
    deadline_ns = now_ns() + budget.ns
    if call.deadline_ns is None or deadline_ns < call.deadline_ns:
        call.deadline_ns, call.limited_by = deadline_ns, budget.param
