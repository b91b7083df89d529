"""Models and their calls, however these come."""

from __future__ import annotations

from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from typing import NamedTuple

import anyio
import msgspec

from ....config import ConfigError, RequestError, shown
from ....kserve.deadlines import budget_of
from ....kserve.tensors import (
    InferRequest,
    InferResponse,
    ModelSpec,
    NamedTensor,
    RequestedOutput,
    TensorError,
    TensorSpec,
)
from ....telemetry import Metrics, now_ns
from ...policy.caller import ANYBODY, Caller
from ...server.http import EngineError
from ...serving.origin import Origin
from .served import ModelCall, ServedModel
from .statistics import Statistics

_FIRST_WORD_S = 0.1

Respond = Callable[[InferResponse], Awaitable[None]]


class ModelState(NamedTuple):
    """How a model is: `reason` says why it is not ready."""

    name: str
    version: str
    ready: bool
    reason: str


class InferenceService:
    """The models of a gateway.

    Attributes:
        statistics: Of all their calls.
    """

    def __init__(self, models: Iterable[ServedModel] = (), metrics: Metrics | None = None) -> None:
        """Args: `metrics` is where calls are told, beside the statistics; None for nowhere.

        Raises:
            ConfigError: Two models have one name.
        """
        self._models: dict[str, ServedModel] = {}
        self._aliases: dict[str, str] = {}
        self.statistics = Statistics(metrics)
        for model in models:
            self.add(model)

    def add(self, model: ServedModel, aliases: Iterable[str] = ()) -> None:
        """Serves one more, under other names as well.

        Raises:
            ConfigError: There is one of such a name.
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
        """Serves a model no longer, where there is one of that name. Calls under way go on."""
        if self._models.pop(name, None) is not None:
            kept = {alias: of for alias, of in self._aliases.items() if of != name}
            self._aliases = kept

    @property
    def models(self) -> list[tuple[ServedModel, list[str]]]:
        """All of them, each with its other names."""
        return [
            (model, [alias for alias, of in self._aliases.items() if of == name])
            for name, model in self._models.items()
        ]

    def allows(self, caller: Caller, name: str) -> bool:
        """Whether a caller may use the model of a name, if there is one.

        What asks the engine of another model, as `M.tokens` asks that of `M`, takes a key for
        that one.
        """
        model = self._models.get(self._aliases.get(name, name))
        asked = model.spec.allowed_as or model.spec.name if model else name
        return caller.models is None or asked in caller.models

    def check_allowed(self, caller: Caller, name: str) -> None:
        """Raises RequestError `model_not_found` when a caller may not use the model of a name."""
        if not self.allows(caller, name):
            raise _not_found(shown(name))

    def specs(self, name: str = "", version: str = "", caller: Caller = ANYBODY) -> list[ModelSpec]:
        """Of the model of a name, or with "" of all that a caller may use.

        Raises:
            RequestError: model_not_found, also when he may not use it.
        """
        if name:
            return [self.spec(name, version, caller)]
        return [each.spec for each in self._models.values() if self.allows(caller, each.spec.name)]

    def spec(self, name: str, version: str = "", caller: Caller = ANYBODY) -> ModelSpec:
        """A model's. Raises RequestError `model_not_found`, also when a caller may not use it."""
        self.check_allowed(caller, name)
        return self._model(name, version).spec

    async def is_ready(self, name: str, version: str = "") -> bool:
        """Whether a request would be served now. Raises as `spec`, or BusError."""
        return not await self._model(name, version).trouble()

    async def states(self, names: Collection[str] | None = None) -> list[ModelState]:
        """How all models are, or those of some names. Raises BusError."""
        wanted = None if names is None else {self._aliases.get(each, each) for each in names}
        return [
            ModelState(name, version, not trouble, trouble)
            for name, model in list(self._models.items())
            if wanted is None or name in wanted
            for trouble in [await model.trouble()]
            for version in model.spec.versions
        ]

    async def infer(
        self, origin: Origin, request: InferRequest, respond: Respond, *, many: bool = False
    ) -> None:
        """Runs a request, and hands each answer on.

        Args:
            origin: Who asks, and how much time the call has that it came with.
            request: What is asked; its parameters may leave it less time.
            respond: Takes each answer, with the outputs that are wanted, in the order wanted.
            many: Whether there may be several; else it is exactly one.

        Raises:
            NanoInferenceError: It can't be done.
        """
        model = self._model(request.model_name, request.model_version)
        spec = model.spec
        self.check_allowed(origin.caller, spec.name)
        # Of one that others are asked for, it is the first.
        origin.account.model = origin.account.model or spec.name
        origin = origin._replace(requested_model=origin.requested_model or request.model_name)
        _check_parameters(spec, request, many=many)
        request = msgspec.structs.replace(request, inputs=checked_inputs(spec, request.inputs))
        wanted = wanted_outputs(spec, request.outputs)
        origin = _within(origin, request.parameters)

        async def answer(outputs: Sequence[NamedTensor]) -> None:
            made = {each.name: each for each in outputs}
            chosen = tuple(made[name] for name in wanted if name in made)
            await respond(InferResponse(model_name=spec.name, id=request.id, outputs=chosen))

        call = ModelCall(request, origin, many=many)
        with self.statistics.measured(spec.name, call), _in_time(origin):
            await model.infer(call, answer)

    async def infer_once(self, origin: Origin, request: InferRequest) -> InferResponse:
        """As `infer`, of which the one answer is returned."""
        found: list[InferResponse] = []

        async def respond(response: InferResponse) -> None:
            found.append(response)

        await self.infer(origin, request, respond)
        (response,) = found
        return response

    def _model(self, name: str, version: str) -> ServedModel:
        model = self._models.get(self._aliases.get(name, name))
        if model is None or (version and version not in model.spec.versions):
            what = f"{shown(name)} of version {shown(version)}" if model else shown(name)
            raise _not_found(what)
        return model


def _not_found(what: str) -> RequestError:
    return RequestError(
        f"there is no model {what}; the repository's index lists those that there are",
        code="model_not_found",
    )


def _check_parameters(spec: ModelSpec, request: InferRequest, *, many: bool) -> None:
    """Raises RequestError for a parameter with the name of an input."""
    for tensor in spec.inputs:
        if tensor.name in request.parameters:
            one = "; this call has one answer, so for several call ModelStreamInfer or POST "
            one += f"/v2/models/{spec.name}/generate_stream"
            raise RequestError(
                f"{tensor.name} is an input of {spec.name}, and no parameter; send it among the "
                f"inputs as {tensor.datatype} {list(tensor.shape)}"
                + (one if spec.decoupled and not many else "")
            )


def checked_inputs(spec: ModelSpec, inputs: Sequence[NamedTensor]) -> tuple[NamedTensor, ...]:
    """The inputs of a request, which are those of the model.

    Raises:
        TensorError: One is missing, not known, there twice, or not of the model's type or shape.
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
        _check_fits(spec, expected, tensor)
        given[tensor.name] = tensor
    for name, expected in known.items():
        if name not in given and not expected.optional:
            raise TensorError(f"{spec.name} needs the input {name}; add it")
    return tuple(given.values())


def wanted_outputs(spec: ModelSpec, outputs: Sequence[RequestedOutput]) -> tuple[str, ...]:
    """The names of the outputs that a client wants, in its order; all where it names none.

    Raises:
        TensorError: The model has no such output, or it is there twice.
    """
    known = [each.name for each in spec.outputs]
    names = [each.name for each in outputs]
    for place, name in enumerate(names):
        if name not in known or name in names[:place]:
            raise TensorError(
                f"{spec.name} has no output {shown(name)}, or it is there twice; its outputs are "
                f"{', '.join(known)}"
            )
    return tuple(names or known)


def _check_fits(spec: ModelSpec, expected: TensorSpec, tensor: NamedTensor) -> None:
    shape = tensor.shape
    fits = len(shape) == len(expected.shape) and all(
        there in (-1, here) for there, here in zip(expected.shape, shape, strict=True)
    )
    if tensor.datatype != expected.datatype or not fits:
        raise TensorError(
            f"{spec.name} takes {tensor.name} as {expected.datatype} {list(expected.shape)}, where "
            f"-1 is any number, and not as {tensor.datatype} {shown(list(shape))}"
        )


@contextmanager
def _in_time(origin: Origin) -> Iterator[None]:
    """Ends what takes longer than a call may. The engine sees to its own part, and has the first
    word, since it knows how far it came."""
    left_ns = origin.left_ns
    if left_ns is None:
        yield
        return
    with anyio.move_on_after(max(0, left_ns) / 1e9 + _FIRST_WORD_S) as scope:
        yield
    if scope.cancelled_caught:
        raise EngineError(
            f"the call's time ({origin.limited_by}) was over before it ended; give it more",
            code="expired",
        )


def _within(origin: Origin, parameters: Mapping[str, bool | int | float | str]) -> Origin:
    """A call's origin, with the time that a request of it has."""
    budget = budget_of(parameters)
    if budget is None:
        return origin
    deadline_ns = now_ns() + budget.ns
    if origin.deadline_ns is not None and origin.deadline_ns <= deadline_ns:
        return origin
    return origin._replace(deadline_ns=deadline_ns, limited_by=budget.param)
