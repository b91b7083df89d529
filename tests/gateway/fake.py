"""A fake engine with configurable outputs, which records its requests."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import anyio
import httpx
import msgspec

from nano_inference.bus.backlog import Backlog
from nano_inference.bus.public import (
    Completion,
    CompletionChunk,
    CompletionSample,
    ErrorInfo,
    GenerateRequest,
    KVSessionResult,
    Output,
    SessionAction,
    Timings,
    Usage,
)
from nano_inference.bus.recipes import has_id
from nano_inference.bus.weights import StagedWeights, WeightsSource
from nano_inference.config import BusConfig, BusError, Config, NanoInferenceError, load_config
from nano_inference.gateway.app import GatewayApp, make_app
from nano_inference.gateway.server.calls import ObservedCalls
from nano_inference.gateway.server.measures import Measures
from nano_inference.gateway.serving.lane_state import Readiness
from nano_inference.pipeline.client import BusClient
from nano_inference.store.board import StageReport
from nano_inference.store.store import memory_store
from nano_inference.telemetry import Metrics, TraceContext, Tracing

Outputs = Callable[[GenerateRequest], list[Output]]

LIMIT_S = 60
"""The longest time of a test, and of a wait for an engine's state."""


class FakeResults:
    """The last output of each request."""

    def __init__(self) -> None:
        self.last_outputs: dict[str, Output] = {}

    async def last(self, request_id: str, entry_id: str) -> Output | None:
        return self.last_outputs.get(request_id)

    async def recorded(self, id: str, *, search: bool = True) -> list[Completion]:
        ends = [each for each in self.last_outputs.values() if isinstance(each, Completion)]
        return [each for each in ends if has_id(each, id)]


class FakeBus:
    """The parts of a bus that the gateway uses directly."""

    def __init__(self) -> None:
        self.store = memory_store(BusConfig())
        self.results = FakeResults()
        self.model = ""
        self.durable = True


def _recorder(name: str) -> Callable[..., Awaitable[None]]:
    """A method of the engine that records its arguments, which have to fit the client's method."""
    signature = inspect.signature(getattr(BusClient, name))

    async def record(self: FakeEngine, *given: Any, **named: Any) -> None:
        asked = signature.bind(self, *given, **named).arguments
        if "tags" in asked:
            asked["tags"] = tuple(asked["tags"])
        left_out = ("self", "timeout_s")
        self._called(name, **{key: each for key, each in asked.items() if key not in left_out})

    return record


class FakeEngine:
    """A fake BusClient, and its `deployment`.

    Attributes:
        calls: (method, its arguments) of all but `submit` and `reports`, in order.
        requests: The submitted requests.
        traces: The trace of each request.
        outputs: Returns the outputs of a request; without a Completion it hangs.
        left: Ids of requests whose output was not read to the end.
        ended: Ids of requests whose output was.
        failures: The errors that methods raise, by method.
        version: The version of the weights in place.
        parts: The number of staged parts, by the update's name.
        session_result: The result of calls about sessions.
        away: The bus is lost after the first output that a client follows.
    """

    tracing = Tracing()
    metrics = Metrics()

    def __init__(self, outputs: Outputs | None = None) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.requests: list[GenerateRequest] = []
        self.traces: list[TraceContext | None] = []
        self.outputs: Outputs = outputs or (lambda request: [completion(request)])
        self.left: list[str] = []
        self.ended: list[str] = []
        self.failures: dict[str, NanoInferenceError] = {}
        self.version = 0
        self.parts: dict[str, int] = {}
        self.session_result = KVSessionResult(outcome="accepted")
        self.stage_reports: list[StageReport] = []
        self.why_not = ""
        self.why_no_role: dict[str, str] = {}
        self.away = False
        self._held = False
        self._cancelled: set[str] = set()
        self._changed = anyio.Event()
        self.bus = FakeBus()
        self.deployment = self

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until this holds; checked when requests arrive or are left."""
        with anyio.fail_after(LIMIT_S):
            while not holds():
                await self._changed.wait()

    def hold(self) -> None:
        """Hold each request after its first output, until `go` or its cancellation."""
        self._held = True

    def go(self) -> None:
        """Let held requests go on."""
        self._held = False
        self._change()

    def _change(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    @property
    def names(self) -> list[str]:
        """The methods called, without reads."""
        left_out = ("weight_version", "trouble", "finish_update")
        return [name for name, _ in self.calls if name not in left_out]

    def last(self, name: str) -> dict[str, Any]:
        return next(given for called, given in reversed(self.calls) if called == name)

    def _called(self, name: str, **given: Any) -> None:
        self.calls.append((name, given))
        if name in self.failures:
            raise self.failures[name]

    async def submit(
        self, request: GenerateRequest, trace: TraceContext | None = None
    ) -> AsyncGenerator[Output, None]:
        await self.publish(request, trace)
        async with aclosing(self._made(request)) as outputs:
            async for output in outputs:
                yield output

    async def _made(self, request: GenerateRequest) -> AsyncGenerator[Output, None]:
        done = False
        try:
            for place, output in enumerate(self.outputs(request)):
                if place == 1 and await self._cancelled_while_held(request.request_id):
                    output = aborted(request, self.outputs(request))
                done = isinstance(output, Completion)
                self.bus.results.last_outputs[request.request_id] = output
                yield output
                if done:
                    return
            await anyio.sleep_forever()
        finally:
            (self.ended if done else self.left).append(request.request_id)
            self._change()

    async def _cancelled_while_held(self, request_id: str) -> bool:
        if self._held:
            await self.until(lambda: not self._held or request_id in self._cancelled)
        return self._held

    async def publish(self, request: GenerateRequest, trace: TraceContext | None = None) -> str:
        self.requests.append(request)
        self.traces.append(trace)
        self._change()
        return f"{len(self.requests)}-0"

    async def follow(
        self, request_id: str, entry_id: str = "", *, just_published: bool = False
    ) -> AsyncGenerator[Output, None]:
        """Any number of times, from the first output on."""
        (request,) = (each for each in self.requests if each.request_id == request_id)
        async with aclosing(self._made(request)) as outputs:
            async for output in outputs:
                yield output
                if self.away:
                    raise BusError("away")

    async def cancel(self, request_id: str, entry_id: str = "") -> None:
        self._called("cancel", request_id=request_id)
        self._cancelled.add(request_id)
        self._change()

    cancel_all, pause, resume, flush_cache = map(
        _recorder, ("cancel_all", "pause", "resume", "flush_cache")
    )
    join_weights_group, leave_weights_group = map(
        _recorder, ("join_weights_group", "leave_weights_group")
    )
    release_memory, resume_memory = map(_recorder, ("release_memory", "resume_memory"))

    async def kv_session(
        self, session: str, action: SessionAction, *, ttl_s: float | None, tenant: str
    ) -> KVSessionResult:
        self._called("kv_session", session=session, action=action, ttl_s=ttl_s, tenant=tenant)
        return self.session_result

    async def weight_version(self) -> int:
        self._called("weight_version")
        return self.version

    async def update_weights(
        self,
        weights: Any,
        *,
        version: int | None,
        timeout_s: float,
        name: str = "",
        decide: Callable[[int, str], Awaitable[None]] | None = None,
        **given: Any,
    ) -> int:
        self._called("update_weights", weights=weights, version=version, **given)
        if isinstance(weights, StagedWeights):
            assert self.parts.pop(weights.update) == weights.parts
        made = self.version + 1 if version is None else version
        if decide is not None:
            await decide(made, "")
            await self.finish_update(name, made, timeout_s=timeout_s)
        self.version = made
        return made

    async def finish_update(
        self, name: str, version: int, logged: str = "", *, timeout_s: float
    ) -> int:
        self._called("finish_update", update=name, version=version)
        self.version = version
        return version

    async def stage_weights(
        self, update: str, weights: WeightsSource, *, part: int, timeout_s: float
    ) -> None:
        self._called("stage_weights", weights=weights)
        self.parts = {update: part + 1}

    async def weight_checksums(self) -> dict[str, str]:
        return {"lane0/executor:a": "12"}

    async def reports(self) -> list[StageReport]:
        return self.stage_reports

    async def backlog(self) -> Backlog:
        self._called("backlog")
        return Backlog(0, 0, 0, 0)

    async def trouble(self) -> str:
        self._called("trouble")
        return self.why_not

    async def role_trouble(self, role: str) -> str:
        self._called("role_trouble", role=role)
        return self.why_no_role.get(role, "")


def aborted(request: GenerateRequest, outputs: list[Output]) -> Completion:
    """The end of a cancelled request, with the tokens of its outputs."""
    (end,) = (each for each in outputs if isinstance(each, Completion))
    samples = [msgspec.structs.replace(each, finish_reason="abort") for each in end.samples]
    return completion(request, *samples, status="cancelled")


def sample(token_ids: tuple[int, ...] = (5, 6), **changed: Any) -> CompletionSample:
    """A sample that ended by its length; `changed` replaces fields."""
    fields: dict[str, Any] = {
        "sample_index": 0,
        "text": "five six",
        "token_ids": token_ids,
        "logprobs": tuple(-0.5 - place for place in range(len(token_ids))),
        "finish_reason": "length",
        "weight_version": 3,
        "weight_versions": ((3, 0),),
    }
    return CompletionSample(**fields | changed)


def completion(request: GenerateRequest, *samples: CompletionSample, **changed: Any) -> Completion:
    """The completion of a request, with `n` samples by default."""
    made = samples or tuple(sample(sample_index=index) for index in range(request.n))
    fields: dict[str, Any] = {
        "request_id": request.request_id,
        "entry_id": "1-0",
        "status": "done",
        "samples": made,
        "usage": Usage(
            prompt_tokens=4,
            cached_tokens=3,
            completion_tokens=sum(len(each.token_ids) for each in made),
        ),
        "timings": Timings(received_ns=10**9, finished_ns=3 * 10**9),
    }
    return Completion(**fields | changed)


def refused(code: str, message: str = "no", retry_after_s: float | None = None) -> Outputs:
    """Answers every request with an error."""
    error = ErrorInfo(code=code, message=message, retry_after_s=retry_after_s)
    return lambda request: [
        Completion(request_id=request.request_id, entry_id="1-0", status="error", error=error)
    ]


def chunk(
    request: GenerateRequest, token_ids: tuple[int, ...] = (7,), text: str = "<7>", **changed: Any
) -> CompletionChunk:
    """A chunk of a request's first sample; `changed` replaces fields."""
    fields: dict[str, Any] = {
        "request_id": request.request_id,
        "entry_id": "1-0",
        "sample_index": 0,
        "token_offset": 0,
        "token_ids": token_ids,
        "logprobs": (-1.0,) * len(token_ids),
        "text": text,
    }
    return CompletionChunk(**fields | changed)


def report(**changed: Any) -> StageReport:
    """The report of a stage that is ready; `changed` replaces fields."""
    fields: dict[str, Any] = {
        "lane": "lane0",
        "stage": "admission",
        "incarnation": "1",
        "host": "here",
        "pid": 1,
        "epoch": 1,
        "state": "ready",
    }
    return StageReport(**fields | changed)


def app_of(
    engine: FakeEngine,
    settings: Config | dict[str, Any] | None = None,
    measures: Measures | None = None,
    readiness: Readiness | None = None,
) -> GatewayApp:
    """The application of a gateway with these settings."""
    if not isinstance(settings, Config):
        settings = load_config(env={}, overrides=settings or {})
    return make_app(engine, settings, measures, readiness)  # type: ignore[arg-type]


ACCEPTED = {"Accept": "*/*, text/event-stream"}
"""Headers of a client that reads the ids of events."""


class Client(httpx.AsyncClient):
    """A client of an ASGI application.

    Attributes:
        engine: The gateway's.
    """

    engine: FakeEngine


def observed(app: GatewayApp) -> ObservedCalls:
    """Return an application whose responses have the headers of the server."""
    return ObservedCalls(app, Measures(), [], on_call=app.on_call)


def http_of(
    app: Any,
    engine: FakeEngine | None = None,
    *,
    raise_app_exceptions: bool = True,
    **options: Any,
) -> Client:
    if isinstance(app, GatewayApp):
        app = observed(app)
    transport = httpx.ASGITransport(app, raise_app_exceptions=raise_app_exceptions)
    options["headers"] = ACCEPTED | options.get("headers", {})
    client = Client(transport=transport, base_url="http://127.0.0.1", **options)
    if engine is not None:
        client.engine = engine
    return client


def data_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The data of the events of a stream, without its end; or its lines, if they are JSON."""
    if answer.headers["content-type"] == "application/x-ndjson":
        return [json.loads(line) for line in answer.text.splitlines()]
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


def poster(path: str, body: dict[str, Any]) -> Callable[..., Awaitable[dict[str, Any]]]:
    """Return a function that posts a body, with more fields, and returns a successful answer."""

    async def posted(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
        answer = await http.post(path, json=body | fields)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    return posted
