"""Clients of a pipeline over its bus, and of a server over HTTP, with the same methods."""

from __future__ import annotations

import dataclasses
import math
import re
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Generic, Self, TypeVar
from urllib.parse import quote

import httpx2
import msgspec
from msgspec.structs import replace

from ..bus import Bus
from ..bus.codec import decode_output
from ..bus.public import DEFAULT_TENANT, Completion, CompletionChunk, ErrorInfo, Output
from ..config import (
    API_KEY_VARIABLE,
    BusError,
    ConfigError,
    ModelConfig,
    NanoInferenceError,
    RequestError,
    cut,
    nearest,
    shown,
)
from ..pipeline.client import BusClient
from ..pipeline.models import ModelStatus
from ..pipeline.operations import OPERATIONS
from ..pipeline.scoring import Request, Submitter
from ..pipeline.status import PipelineStatus, of_models
from ..pipeline.token_tree import SessionSample
from . import connection
from .connection import ServerAddress, Target, connected, run_with, target_of
from .images import for_bus
from .lasting import AWAY_S, LOST, LastingCall, Read
from .openai_calls import AnswerPart, CallError, Chunk, ReceivedCall, openai_call, part_of
from .options import Options
from .requests import given
from .terminal import complain, waiting

T = TypeVar("T")

_CONNECT_S = 10.0
_CALL_HEADER = "X-Request-Id"
_DONE = "[DONE]"
REFUSALS = range(400, 600)
"""Statuses of answers that refuse."""

_PARAMETER = re.compile(r"\{.*?\}")


class ListedModel(msgspec.Struct, frozen=True):
    """A model that takes requests.

    Attributes:
        id: Its name in requests.
        max_model_len: Most tokens of prompt and answer together; None if unknown.
        root: The folder or file that it was loaded from, as in `--model`; None if unknown.
    """

    id: str
    max_model_len: int | None = None
    root: str | None = None


class Unreachable(NanoInferenceError):
    """No server answers at a URL."""

    code = "unreachable"


@asynccontextmanager
async def client_at(target: Target, model: str | None = None) -> AsyncIterator[Client]:
    """Connect to a server or a pipeline, for one of several models or for all.

    Raises:
        NanoInferenceError: Nothing answers.
    """
    if isinstance(target, ServerAddress):
        async with ServerClient(target, model) as server:
            yield server
    else:
        async with connected(target, model) as client:
            yield PipelineClient(client)


@asynccontextmanager
async def submitter_at(target: Target, model: str | None = None) -> AsyncIterator[Submitter]:
    """Connect to a server or a pipeline, for requests in the form of the bus.

    Raises:
        NanoInferenceError: Nothing answers.
    """
    if isinstance(target, ServerAddress):
        async with ServerClient(target, model) as server:
            yield ServerSubmitter(server)
    else:
        async with connected(target, model) as client:
            yield client


def run_operation(
    options: Options,
    operation: str,
    arguments: dict[str, Any],
    what: str = "waiting for the pipeline",
    target: Target | None = None,
) -> Any:
    """Run an operation of `OPERATIONS`, and return its result.

    Args:
        options: Name the server or the bus, and the model.
        operation: Its name.
        arguments: By name; None for the default. Paths are those of this machine.
        what: Shown while it takes long.
        target: The server or the bus; None for that of the options.

    Raises:
        NanoInferenceError: It can't be reached, or the operation failed.
    """
    named = {
        name: str(value.absolute()) if isinstance(value, Path) else value
        for name, value in given(arguments).items()
    }
    target = target or target_of(options)
    with waiting(what):
        return run_with(
            client_at(target, options.served), lambda client: client.operate(operation, named)
        )


class PipelineClient:
    """A client of a pipeline, over its bus. All methods raise NanoInferenceError."""

    def __init__(self, client: BusClient) -> None:
        self._client = client
        self.load, self.unload = client.load_model, client.unload_model

    async def operate(self, name: str, arguments: dict[str, Any]) -> Any:
        """Run an operation of `OPERATIONS`."""
        return await OPERATIONS[name].run(self._client, **arguments)

    def follow(self, name: str, arguments: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """Return the results of an operation that streams."""
        results: AsyncGenerator[Any, None] = OPERATIONS[name].run(self._client, **arguments)
        return results

    async def check(self, found: Sequence[ModelStatus] = ()) -> str:
        """Check that requests can be sent, and complain on standard error if they have to wait.

        Args:
            found: Models that the pipeline is known to have.

        Returns:
            The name of the model that requests must give; "" if they need not.
        """
        if trouble := await self._client.deployment.trouble():
            if not (found or await self._client.deployment.reports()):
                raise BusError(trouble)
            complain(f"waiting: {trouble}")
        return ""

    async def ask(self, request: dict[str, Any]) -> AsyncGenerator[AnswerPart, None]:
        """Yield the answer as it arrives. A caller that stops before its end cancels it.

        Args:
            request: Fields of a GenerateRequest for one sample; a server also takes `tools`.

        Raises:
            RequestError: It was refused, or it failed, perhaps after some text.
        """
        length = 0
        if "messages" in request:
            request = request | for_bus(request["messages"])
        async with aclosing(self._client.submit(request)) as outputs:
            async for output in outputs:
                if isinstance(output, CompletionChunk):
                    length += len(output.text)
                    yield AnswerPart(output.text)
                    continue
                if output.samples and (rest := output.samples[0].text[length:]):
                    yield AnswerPart(rest)
                if output.error is not None:
                    raise RequestError(output.error.message, code=output.error.code)

    async def cancel(self, request_id: str) -> None:
        """Cancel a request; ignored if it has ended or is unknown."""
        await self.check()
        await self._client.cancel(request_id)

    async def models(self) -> list[ListedModel]:
        """Return the models that take requests."""
        return [
            ListedModel(model.id, model.max_model_len or None, model.path)
            for model in await self._client.models()
            if model.takes_requests
        ]

    async def details(self) -> Sequence[ListedModel | ModelStatus]:
        """Return all models with their numbers, as far as this client may read them."""
        return await self._client.models()

    async def statuses(self) -> Sequence[ListedModel | ModelStatus]:
        """Return all models, with as much as this client may read."""
        found = await self._client.models()
        if len(found) <= 1:
            await self.check(found)
        return found


class _Card(ListedModel, frozen=True):
    state: str = ""


class _List(msgspec.Struct, Generic[T], frozen=True):
    data: list[T] = []


class ServerClient:
    """A client of a server, over HTTP. Use it as an async context.

    It has the methods of `PipelineClient`, and reads status and probes.

    Attributes:
        url: The URL of OpenAI's interface, without a slash at its end.
        root: The server's URL, below which the other interfaces are.
    """

    def __init__(self, server: ServerAddress, model: str | None = None) -> None:
        """`model`: of operations; None for all."""
        self._model = model
        self.url = server.url
        self.root = server.url.removesuffix("/v1")
        self._at = server.typed or server.url
        headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
        # The server limits the time of an answer, and Ctrl-C ends it.
        timeout = httpx2.Timeout(None, connect=_CONNECT_S)
        # A batch sends more calls at once than the default of connections.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._said_at = -math.inf
        self._client = httpx2.AsyncClient(timeout=timeout, headers=headers, limits=limits)

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._client.__aexit__(*error)

    @asynccontextmanager
    async def _answer(
        self,
        method: str,
        url: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        accepted: Collection[int] = (),
        **content: Any,
    ) -> AsyncIterator[httpx2.Response]:
        """Yield an answer with a status of success, or one that is accepted.

        Raises:
            RequestError: The status is another one, or the connection was lost during the answer.
            Unreachable: There was no answer.
        """
        answered, call_id = False, uuid.uuid4().hex
        headers = {_CALL_HEADER: call_id, **(headers or {})}
        try:
            if body is not None:
                content["json"] = body
            async with self._client.stream(method, url, headers=headers, **content) as response:
                answered = True
                if not (response.is_success or response.status_code in accepted):
                    raise refusal(response.status_code, await response.aread())
                yield response
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            why = _why(error)
            if isinstance(error, httpx2.SSEError):
                raise RequestError(
                    f"{self._at} is not such a server: {why}",
                    code="malformed_output",
                    remedy="give the URL of a server of nano-inference",
                ) from None
            if answered or isinstance(error, httpx2.RemoteProtocolError | httpx2.ReadError):
                raise RequestError(
                    f"the server at {self._at} ended call {call_id} before its answer did ({why})",
                    code=LOST,
                    remedy="send it again once `nano-inference health --url` says that it is ready",
                ) from None
            if self.url == connection.DEFAULT_SERVER:
                raise Unreachable(
                    f"no server at {self._at}; start one with `nano-inference serve`, or give the "
                    "URL of another with --url, or a pipeline's bus with --bus"
                ) from None
            raise Unreachable(f"can't reach {self._at}: {why}") from None

    async def _call(self, method: str, url: str, kind: type[T], body: Any = None) -> T:
        async with self._answer(method, url, body) as response:
            return self._decoded(await response.aread(), kind)

    def _decoded(self, body: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(body, type=kind)
        except ValueError:
            raise RequestError(
                f"{self._at} is not such a server; it answers {cut(ascii(body[:400]))}",
                code="malformed_output",
                remedy="give the URL of a server of nano-inference",
            ) from None

    # --- requests -------------------------------------------------------------------------------

    async def check(self) -> str:
        """See PipelineClient."""
        return next((model.id for model in await self.models()), "")

    async def ask(self, request: dict[str, Any]) -> AsyncGenerator[AnswerPart, None]:
        """See PipelineClient."""
        path = "/chat/completions" if "messages" in request else "/completions"
        asked = self._lasting(path, *openai_call(request))
        calls: dict[int, ReceivedCall] = {}

        def read(data: str) -> Read:
            if data == _DONE:
                return Read([], is_last=True)
            chunk = self._decoded(data.encode(), Chunk)
            if chunk.error is not None:
                raise RequestError(chunk.error.message, code=str(chunk.error.code))
            return Read(chunk.choices)

        async with aclosing(asked.values(read)) as chunks:
            async for choices in chunks:
                for choice in choices:
                    part = part_of(choice, calls)
                    if part.text or part.reasoning:
                        yield part
                    if choice.finish_reason == "abort":
                        raise RequestError(
                            "the request was cancelled elsewhere",
                            code="aborted",
                            remedy="send it again",
                        )
        if calls:
            yield AnswerPart(calls=tuple(call for _, call in sorted(calls.items())))

    async def outputs(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> AsyncGenerator[Output, None]:
        """Yield the outputs of a request, which the last one ends. Raises RequestError: it failed,
        or the server has lost it."""
        asked = self._lasting(path, body, headers)
        if not body.get("stream", True):
            asked = dataclasses.replace(asked, opened=self._outcome, data=_whole)
        asked.repeats = True
        entry_id = ""

        def read(data: str) -> Read:
            nonlocal entry_id
            try:
                output = decode_output(data.encode())
            except ValueError:
                error = self._decoded(data.encode(), Chunk).error or CallError()
                raise RequestError(error.message, code=str(error.code)) from None
            if entry_id not in ("", output.entry_id) and output.entry_id:
                raise asked.lost()  # another request, since the server has not kept the first
            entry_id = output.entry_id or entry_id
            return Read(output, isinstance(output, Completion))

        async with aclosing(asked.values(read)) as outputs:
            async for output in outputs:
                yield output

    def _lasting(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> LastingCall:
        return LastingCall(self._answer, self.url, path, body, headers, self._say_once)

    @asynccontextmanager
    async def _outcome(
        self, method: str, url: str, body: Any, headers: dict[str, str]
    ) -> AsyncIterator[httpx2.Response]:
        """As `_answer`, for a request whose Completion may have a status that refuses."""
        accepted = REFUSALS if method == "POST" else ()
        async with self._answer(method, url, body, headers, accepted) as response:
            if not response.is_success:
                content = await response.aread()
                try:
                    decode_output(content)
                except ValueError:
                    raise refusal(response.status_code, content) from None
            yield response

    def _say_once(self, sentence: str) -> None:
        """Complain of the first of many calls that lose their connections together."""
        if time.monotonic() - self._said_at > AWAY_S:
            complain(sentence)
            self._said_at = time.monotonic()

    async def cancel(self, request_id: str) -> None:
        """See PipelineClient."""
        # OpenAI's interface has no such call.
        async with self._answer("POST", f"{self.root}/abort_request", {"rid": request_id}):
            pass

    async def replay(self, id: str) -> dict[str, Any]:
        """Have a request of the server computed again; return its answer."""
        path = f"{self.url}/replay/{quote(id, safe='')}"
        return await self._call("POST", path, dict[str, Any], {})

    async def samples(
        self, session: str, tenant: str | None, *, partial: bool
    ) -> list[SessionSample]:
        """Return the training samples of a session's token tree; `partial`: without lost turns."""
        query = "?partial=true" if partial else ""
        async with self._session("GET", session, tenant, f"/samples{query}") as response:
            return self._decoded(await response.aread(), _List[SessionSample]).data

    async def delete_session(self, session: str, tenant: str | None) -> None:
        """Delete a session's token tree."""
        async with self._session("DELETE", session, tenant) as response:
            await response.aread()

    def _session(
        self, method: str, session: str, tenant: str | None, rest: str = ""
    ) -> AbstractAsyncContextManager[httpx2.Response]:
        of_model = self._model and f"{self.root}/models/{quote(self._model, safe='')}/v1"
        path = f"{of_model or self.url}/sessions/{quote(session, safe='')}{rest}"
        return self._answer(method, path, headers=given({"X-Tenant": tenant}))

    # --- models ---------------------------------------------------------------------------------

    async def models(self) -> list[ListedModel]:
        """See PipelineClient."""
        cards = (await self._call("GET", f"{self.url}/models", _List[_Card])).data
        return [ListedModel(card.id, card.max_model_len, card.root) for card in cards]

    async def details(self) -> Sequence[ListedModel | ModelStatus]:
        """See PipelineClient."""
        with suppress(RequestError):  # the key has no scope for it
            return (await self._call("GET", self._models(), _List[ModelStatus])).data
        return await self.models()

    async def statuses(self) -> Sequence[ListedModel | ModelStatus]:
        """See PipelineClient."""
        cards = (await self._call("GET", f"{self.url}/models", _List[_Card])).data
        if any(card.state for card in cards):
            with suppress(RequestError):  # the key has no scope for it
                return (await self._call("GET", self._models(), _List[ModelStatus])).data
        return [ListedModel(card.id, card.max_model_len, card.root) for card in cards]

    async def load(self, model: str | ModelConfig) -> ModelStatus:
        """See BusClient.load_model."""
        if isinstance(model, str):
            return await self._call("POST", f"{self._models(model)}/load", ModelStatus, {})
        return await self._call("POST", self._models(), ModelStatus, msgspec.to_builtins(model))

    async def unload(
        self, model: str, *, timeout_s: float | None = None, remove: bool = False
    ) -> ListedModel | ModelStatus:
        """See BusClient.unload_model."""
        body = given({"timeout_s": timeout_s})
        if remove:
            return await self._call("DELETE", self._models(model), ListedModel, body)
        return await self._call("POST", f"{self._models(model)}/unload", ModelStatus, body)

    def _models(self, model: str = "") -> str:
        return f"{self.root}/admin/models" + (f"/{quote(model, safe='')}" if model else "")

    # --- operations -----------------------------------------------------------------------------

    async def operate(self, name: str, arguments: dict[str, Any]) -> Any:
        """See PipelineClient."""
        async with self._operation(name, arguments) as response:
            return self._decoded(await response.aread(), OPERATIONS[name].result)

    async def follow(self, name: str, arguments: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """See PipelineClient."""
        async with self._operation(name, arguments) as response:
            async for event in httpx2.EventSource(response):
                yield self._decoded(event.data.encode(), OPERATIONS[name].result)

    def _operation(
        self, name: str, arguments: dict[str, Any]
    ) -> AbstractAsyncContextManager[httpx2.Response]:
        body = arguments | given({"model": self._model})
        headers = given({"X-Tenant": body.pop("tenant", None)})
        url = f"{self.root}/admin/operations/{name}"
        return self._answer("POST", url, msgspec.to_builtins(body), headers)

    async def administer(self, name: str, *arguments: Any) -> Any:
        """Call a method of the gateway's `Administration`."""
        # This import takes time.
        from ..gateway.policy.administration import ROUTES

        method, path = ROUTES[name].split()
        values = iter(arguments)
        path = _PARAMETER.sub(lambda _: quote(next(values), safe=""), path)
        found = await self._call(method, self.root + path, dict[str, Any], next(values, None))
        return found["data"] if name == "keys" else found

    # --- status ---------------------------------------------------------------------------------

    async def status(self, model: str | None = None) -> PipelineStatus:
        """Return the status of the pipeline behind a gateway.

        Args:
            model: The id of one of several models; None for all.

        Raises:
            Unreachable: Nothing answers there.
            RequestError: The key is refused; or `unknown_model`.
            ConfigError: It is no server of nano-inference.
        """
        status, body = await self._get("/status")
        if status == 404:
            raise ConfigError(
                f"{self._at} has no /status; only nano-inference's servers have",
                remedy="give the URL of one",
            )
        try:
            found = msgspec.json.decode(body, type=PipelineStatus)
        except ValueError:
            raise ConfigError(
                f"the /status of {self._at} is not an answer of nano-inference",
                remedy="give the URL of nano-inference",
            ) from None
        found = replace(found, url=self.root)
        return found if model is None else of_one_model(found, model)

    async def probe(self, path: str) -> str:
        """Return why a probe says no; "" for yes. It needs no key.

        Raises:
            Unreachable: Nothing answers there.
            ConfigError: The server has no such probe.
            RequestError: It refuses to answer.
        """
        # KServe's probe of a model says no with 400.
        status, body = await self._get(path, refused=(400, 503))
        if status == 404:
            raise ConfigError(f"{self._at} has no {path}; give that of nano-inference")
        if status == 200:
            return ""
        try:
            answer = msgspec.json.decode(body, type=dict[str, object])
        except ValueError:
            answer = {}
        return str(answer.get("reason") or answer.get("error") or f"status {status}")

    async def _get(self, path: str, refused: Collection[int] = ()) -> tuple[int, bytes]:
        """Return status and body of a GET; `refused` statuses are answers too, and 404."""
        async with self._answer("GET", f"{self.root}{path}", accepted=(404, *refused)) as response:
            return response.status_code, await response.aread()


Client = PipelineClient | ServerClient


class ServerSubmitter(Submitter):
    """Submits requests to a server, in the form and with the outputs that they have on a bus."""

    def __init__(self, server: ServerClient) -> None:
        self._server = server

    @property
    def bus(self) -> Bus:  # type: ignore[override]
        raise ConfigError("a server's bus can't be reached over HTTP; name it with --bus")

    async def publish(self, request: Request | bytes) -> str:
        """Raises ConfigError: a server ends a request that its client does not await."""
        raise ConfigError(
            "a server ends a request whose client does not wait; name its bus with --bus, or send "
            '`POST /v1/responses` with "background": true'
        )

    async def submit(self, request: Request | bytes) -> AsyncGenerator[Output, None]:
        """See Submitter."""
        body = msgspec.json.decode(request) if isinstance(request, bytes) else request
        plain: dict[str, Any] = msgspec.to_builtins(body)
        tenant = plain.get("tenant", DEFAULT_TENANT)
        headers = {} if tenant == DEFAULT_TENANT else {"X-Tenant": tenant}
        outputs = self._server.outputs("/requests", plain, headers)
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    yield output
        except RequestError as error:
            info = ErrorInfo(code=error.code, message=error.message)
            id = plain.get("request_id", "")
            yield Completion(request_id=id, entry_id="", status="error", error=info)


def of_one_model(found: PipelineStatus, model: str) -> PipelineStatus:
    """Return the status of one model. Raises RequestError: `unknown_model`."""
    loads = [report.load for lane in found.lanes for report in lane.stages.values()]
    names = {str(load.get("model", "")) for load in loads}
    names |= {alias for load in loads for alias in str(load.get("aliases", "")).split(",")}
    # While the only model is being loaded, its names are unknown.
    known = set(found.models) or names - {""}
    if known and model not in known:
        raise RequestError(
            f"there is no model {shown(model)} here{nearest(model, sorted(known))}",
            code="unknown_model",
        )
    return of_models(found, (model,)) if found.models else found


async def _whole(response: httpx2.Response) -> AsyncIterator[tuple[str, str]]:
    """Yield an answer in one piece, which has no id."""
    yield "", (await response.aread()).decode()


def _why(error: BaseException) -> str:
    """Return why a connection failed, in the words of the system rather than of the library."""
    if found := connection.system_reason(error):
        return found
    if isinstance(error, httpx2.ConnectTimeout):
        return f"nothing answers within {_CONNECT_S:.0f} s"
    if isinstance(error, httpx2.RemoteProtocolError | httpx2.ReadError):
        return "the connection was closed"
    return str(error) or type(error).__name__


def refusal(status: int, body: bytes) -> RequestError:
    """Return the error of an answer, in OpenAI's form or as its status."""
    try:
        error = msgspec.json.decode(body, type=Chunk).error or CallError()
    except ValueError:
        error = CallError()
    message = error.message or cut(f"the server answers with status {status}: {body[:400]!r}")
    if error.code == "missing_api_key":
        message = (
            f"the server takes no call without a key; give --api-key, or {API_KEY_VARIABLE}; the "
            "first key is made without one, by `nano-inference admin keys create root --scope "
            "admin` with the server's --config, or --bus and --set policy.backend"
        )
    return RequestError(message, code=str(error.code or status))
