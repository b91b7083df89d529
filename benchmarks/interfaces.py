"""Requests of every kind through every interface: HTTP, gRPC, Redis by hand, and BusClient.

Parts of soak.py and chaos_days.py. An interface sends a request, again after failures as a good
client would, and returns the answer. The same request through the same interface has the same
answer each time, so an answer is compared with that of an undisturbed run.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import chaos
import chaos_rig
import httpx
import mixed_requests
import msgspec
import numpy as np
import redis.asyncio
from chaos_http import PASSING, Reading, events_of
from chaos_rig import Entry

from nano_inference import BusClient, Completion, CompletionChunk
from nano_inference.config import BusError, NanoInferenceError
from nano_inference.kserve import KServeClient, KServeError, NamedTensor, text_tensor

LIMIT_S = 240.0
"""The longest time of a request; one without an end by then is lost."""
GUEST = "guest"
"""An adapter that is loaded and unloaded while requests name it."""
BLOCKED = "xyzzy"
"""The text that guardrails block, where there are some."""
SECOND = "second"
"""A model that is loaded and unloaded while requests name it."""
REFUSALS = frozenset({"unknown_model", "model_not_found", "model_not_loaded", "adapter_unloaded"})
"""Codes of requests for a model or adapter that is being unloaded."""
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": mixed_requests.PERSON},
}
_VOLATILE = frozenset({"id", "weight_versions", "weight_version", "ids", "created"})


# --- requests -----------------------------------------------------------------------------------


class Ask(NamedTuple):
    """A request.

    Attributes:
        key: Key of requests with the same answer; "" for a prompt that no other request has.
        kind: Its special feature.
        interface: The interface that it is sent through.
        request: As on the bus.
    """

    key: str
    kind: str
    interface: str
    request: dict[str, Any]


def as_chat(request: dict[str, Any], rng: random.Random) -> None:
    """Ask for a call of a tool, over HTTP; the template of the second model has them."""
    request["model"] = SECOND
    request["tools"] = [TOOL]
    request["sampling"]["ignore_eos"] = False
    request["sampling"].pop("stop", None)


def reasoning(request: dict[str, Any], rng: random.Random) -> None:
    """A budget ends the reasoning, and then a schema holds; the second model's template has it."""
    as_chat(request, rng)
    del request["tools"]
    request["thinking"] = rng.randint(5, 30)
    request["sampling"] |= {"constraint": {"json_schema": mixed_requests.PERSON}, "max_tokens": 120}


def with_guardrail(request: dict[str, Any], rng: random.Random) -> None:
    """The answer would have a text that it may not have, after some tokens."""
    request["sampling"] |= {"constraint": {"regex": f"[a-z]{{5,30}} {BLOCKED} [a-z]{{20,30}}"}}
    request["sampling"] |= {"max_tokens": 80, "ignore_eos": False}
    request["sampling"].pop("stop", None)


def in_background(request: dict[str, Any], rng: random.Random) -> None:
    """A response in the background, which its client reads later."""
    request |= {"background": True, "n": 1}
    request["sampling"] = {
        name: value
        for name, value in request["sampling"].items()
        if name in ("max_tokens", "temperature", "seed")
    }
    request["sampling"]["constraint"] = {"json_schema": mixed_requests.PERSON}


def for_guest(request: dict[str, Any], rng: random.Random) -> None:
    request["model"] = GUEST


def for_second(request: dict[str, Any], rng: random.Random) -> None:
    request["model"] = SECOND


def leaving(request: dict[str, Any], rng: random.Random) -> None:
    """Cancel it, or close its connection, before it ends."""
    request["leaves"] = True
    request["stream"] = True
    request["sampling"] |= {"max_tokens": 200, "ignore_eos": True}
    request["sampling"].pop("stop", None)


HTTP_INTERFACES = ("http", "http stream")
INTERFACES = ("redis", "bus", *HTTP_INTERFACES, "grpc", "grpc stream")
KINDS: dict[str, tuple[Callable[[dict[str, Any], random.Random], None], Sequence[str]]] = {
    "plain": (mixed_requests.plain, INTERFACES),
    "schema": (mixed_requests.with_schema, INTERFACES),
    "regex": (mixed_requests.with_regex, INTERFACES),
    "call": (mixed_requests.with_tool, INTERFACES),
    "penalties": (mixed_requests.with_penalties, INTERFACES),
    "logprobs": (mixed_requests.with_logprobs, ("redis", "bus", "http", "grpc")),
    "embedding": (mixed_requests.as_embedding, ("redis", "bus", "http", "grpc")),
    "images": (mixed_requests.with_images, ("redis", "bus", "http", "grpc")),
    "tool": (as_chat, ("http",)),
    "reasoning": (reasoning, ("http",)),
    "guardrail": (with_guardrail, (*HTTP_INTERFACES, "grpc", "grpc stream")),
    "background": (in_background, ("http",)),
    "adapter": (mixed_requests.with_adapter, ("redis", "bus", *HTTP_INTERFACES)),
    "guest": (for_guest, ("redis", *HTTP_INTERFACES)),
    "second": (for_second, ("redis", *HTTP_INTERFACES, "grpc")),
    "leaving": (leaving, ("redis", "http stream", "grpc stream")),
}
"""Kinds, with the interfaces that have them."""
WITHOUT_GUARDRAILS = tuple(name for name in KINDS if name != "guardrail")


def make_asks(
    count: int,
    seed: int,
    *,
    longest: int = 60,
    kinds: Sequence[str] = WITHOUT_GUARDRAILS,
    interfaces: Sequence[str] = INTERFACES,
    known: bool = True,
) -> list[Ask]:
    """Return requests of each kind and interface in turn; each sampled one has a seed."""
    rng = random.Random(seed)
    pairs = [
        (kind, interface)
        for kind in kinds
        for interface in KINDS[kind][1]
        if interface in interfaces
    ]
    asks = []
    for index, request in enumerate(chaos_rig.make_requests(count, seed, longest)):
        kind, interface = pairs[index % len(pairs)]
        request["prompt"] = f"{seed}-{request['prompt'][:240]}"
        request["sampling"].pop("constraint", None)
        request["stream"] = interface in ("redis", "bus", "http stream", "grpc stream")
        KINDS[kind][0](request, rng)
        if "sampling" in request and request["sampling"]["temperature"] > 0:
            request["sampling"].setdefault("seed", rng.randrange(1 << 30))
        asks.append(Ask(f"{seed}-{index}" if known else "", kind, interface, request))
    return asks


# --- answers ------------------------------------------------------------------------------------


@dataclass
class Answer:
    """The part of an answer that a client has read.

    Attributes:
        content: Must be the same each time; None of a request that left or was refused.
        faults: "lost", "doubled", "gaps".
        refused: The code of a refusal.
        returns: Attempts after the first one.
        remark: Details of a failure.
        first_s: When its first output came, on the monotonic clock.
    """

    content: Any = None
    faults: set[str] = field(default_factory=set)
    refused: str = ""
    returns: int = 0
    remark: str = ""
    first_s: float = 0.0

    def digest(self) -> str:
        """Return a hash of the content."""
        return hashlib.sha256(repr(self.content).encode()).hexdigest()[:16]


def essence(value: Any) -> Any:
    """Return a JSON value without ids and versions."""
    if isinstance(value, dict):
        return {name: essence(each) for name, each in value.items() if name not in _VOLATILE}
    return [essence(each) for each in value] if isinstance(value, list) else value


def samples_of(samples: Sequence[dict[str, Any]]) -> list[Any]:
    names = ("sample_index", "token_ids", "text", "finish_reason", "logprobs", "embedding")
    return [tuple(each.get(name) for name in names) for each in samples]


class Lost(Exception):
    """A request that has failed for good."""


class Passing(Exception):
    """A failure after which a client tries again."""


@dataclass
class Interfaces:
    """The ways into a deployment.

    Attributes:
        bus: A client of the bus.
        redis: A plain client of its server; None: there is no interface "redis".
        prefix: Prefix of the deployment's keys.
        urls: URLs of gateways over HTTP.
        grpc: Addresses of gateways over gRPC.
        model: The name of the served model.
        key: Key of gateways; "" for none.
    """

    bus: BusClient
    redis: redis.asyncio.Redis | None
    prefix: str
    urls: Sequence[str]
    grpc: Sequence[str]
    model: str
    key: str = ""
    _http: httpx.AsyncClient = field(init=False)
    _kserve: list[KServeClient] = field(init=False)
    _stack: contextlib.AsyncExitStack = field(init=False)

    async def __aenter__(self) -> Interfaces:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        self._http = httpx.AsyncClient(limits=limits, timeout=90.0, headers=headers)
        self._stack = contextlib.AsyncExitStack()
        await self._stack.enter_async_context(self._http)
        clients = [KServeClient(address, api_key=self.key, retries=0) for address in self.grpc]
        self._kserve = [await self._stack.enter_async_context(each) for each in clients]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def send(self, ask: Ask, tenant: str = "soak") -> Answer:
        """Send a request until it is answered, refused or lost."""
        answer = Answer()
        name = uuid.uuid4().hex
        send = getattr(self, f"_over_{ask.interface.replace(' ', '_')}")
        try:
            async with asyncio.timeout(LIMIT_S):
                while True:
                    try:
                        await send(ask.request, answer, name, tenant)
                        break
                    except (Passing, BusError, httpx.TransportError, *chaos_rig.AWAY) as error:
                        answer.returns += 1
                        answer.remark = f"{type(error).__name__}: {error}"[:200]
                        await asyncio.sleep(min(2.0, 0.1 * answer.returns))
        except TimeoutError:
            answer.faults.add("lost")
            answer.remark = f"no end within {LIMIT_S:.0f} s; {answer.remark}"
        except (Lost, NanoInferenceError) as error:
            code = getattr(error, "code", "") or error.args[0]
            if code in REFUSALS:
                answer.refused = code
            else:
                answer.faults.add("lost")
                answer.remark = f"{code}: {error}"[:300]
        return answer

    # --- the bus ------------------------------------------------------------------------------

    async def _over_redis(
        self, request: dict[str, Any], answer: Answer, name: str, tenant: str
    ) -> None:
        body = {key: value for key, value in request.items() if key != "leaves"}
        text = json.dumps({"request_id": name, "tenant": tenant, **body})
        link: Any = self.redis
        await chaos_rig.patiently(lambda: link.xadd(f"{self.prefix}:requests", {"json": text}))
        entries: list[Entry] = []
        key, position, goes_on = f"{self.prefix}:out:{name}", "0", True
        while goes_on:
            at = {key: position}
            reply = await chaos_rig.patiently(lambda a=at: link.xread(a, block=1000))  # type: ignore[misc]
            for entry_id, fields in (
                entry for pages in reply.values() for page in pages for entry in page
            ):
                output = json.loads(fields["json"])
                epoch, _, number = entry_id.partition("-")
                entries.append(Entry(int(epoch), int(number), output, time.monotonic()))
                position = entry_id
                goes_on = output["type"] != "completion"
            if entries and not answer.first_s:
                answer.first_s = time.monotonic()
                if request.get("leaves"):
                    await self.bus.cancel(name)
        last = entries[-1].output
        if (code := (last.get("error") or {}).get("code", "")) in REFUSALS:
            raise Lost(code)
        if request.get("leaves"):
            if last["status"] not in ("cancelled", "done"):
                raise Lost(f"it ended as {last['status']}, {last.get('error')}")
            return
        found = chaos.faults_of(entries, request)
        answer.faults |= {"doubled" if each == "duplicated" else each for each in found}
        answer.content = samples_of(last["samples"])
        if found:
            answer.remark = f"{last['status']} {last.get('error')}"

    async def _over_bus(
        self, request: dict[str, Any], answer: Answer, name: str, tenant: str
    ) -> None:
        body = {"request_id": f"{name}-{answer.returns}", "tenant": tenant, **request}
        tokens: dict[int, int] = {}
        ends = 0
        async for output in self.bus.submit(body):
            answer.first_s = answer.first_s or time.monotonic()
            if isinstance(output, CompletionChunk):
                place = tokens.get(output.sample_index, 0)
                if output.token_offset != place:
                    answer.faults.add("doubled" if output.token_offset < place else "gaps")
                tokens[output.sample_index] = output.token_offset + len(output.token_ids)
            elif isinstance(output, Completion):
                ends += 1
                last = output
        if not ends:
            raise Lost("no end")
        if last.error is not None:
            raise Lost(last.error.code)
        if ends > 1:
            answer.faults.add("doubled")
        answer.content = samples_of(msgspec.to_builtins(last.samples))

    # --- HTTP ---------------------------------------------------------------------------------

    def _url(self, answer: Answer, name: str) -> str:
        return self.urls[(int(name, 16) + answer.returns) % len(self.urls)]

    async def _over_http(
        self, request: dict[str, Any], answer: Answer, name: str, tenant: str
    ) -> None:
        path, body = http_body(request, self.model)
        headers = {"X-Tenant": tenant, "Idempotency-Key": name}
        url = self._url(answer, name) + path
        reply = await self._http.post(url, json=body, headers=headers)
        answer.first_s = time.monotonic()
        check(reply.status_code, reply.text)
        found = reply.json()
        while found.get("status") in ("queued", "in_progress"):
            await asyncio.sleep(0.1)
            again = await self._http.get(f"{url}/{found['id']}", headers=headers)
            check(again.status_code, again.text)
            found = again.json()
        if "output" in found:
            if found["status"] not in ("completed", "incomplete"):
                raise Lost(found["status"], str(found.get("error")))
            answer.content = essence([found["status"], found["output"]])
            return
        answer.content = essence(found["data"] if "data" in found else found["choices"])
        if "choices" in found and len(found["choices"]) != request["n"]:
            answer.faults.add("gaps")

    async def _over_http_stream(
        self, request: dict[str, Any], answer: Answer, name: str, tenant: str
    ) -> None:
        path, body = http_body({**request, "stream": True}, self.model)
        headers = {"X-Tenant": tenant}
        if leaves := request.get("leaves"):
            async with self._http.stream(
                "POST", self._url(answer, name) + path, json=body, headers=headers
            ) as reply:
                check(reply.status_code, "" if reply.is_success else (await reply.aread()).decode())
                async for _ in events_of(reply):
                    return
            return
        reading = Reading()
        answer.content = reading
        headers["Idempotency-Key"] = name
        while not reading.ended:
            if reading.last_id:
                headers["Last-Event-ID"] = reading.last_id
            url = self._url(answer, name) + path
            try:
                async with self._http.stream("POST", url, json=body, headers=headers) as reply:
                    text = "" if reply.is_success else (await reply.aread()).decode()
                    check(reply.status_code, text)
                    async for event_id, data in events_of(reply):
                        answer.first_s = answer.first_s or time.monotonic()
                        if reading.take(event_id, data) or data == "[DONE]":
                            break
            except (httpx.TransportError, Passing) as error:
                answer.remark = f"{type(error).__name__}: {error}"[:200]
            if reading.error and reading.error != "bus_unavailable":
                raise Lost(reading.error)
            if not reading.ended:
                answer.returns += 1
                await asyncio.sleep(min(2.0, 0.1 * answer.returns))
        assert leaves is None
        if reading.doubled or any(len(each) > 1 for each in reading.reasons.values()):
            answer.faults.add("doubled")
        if reading.gaps or len(reading.tokens) != request["n"]:
            answer.faults.add("gaps")
        parts = (reading.tokens, reading.texts, reading.reasons)
        answer.content = [sorted(each.items()) for each in parts]

    # --- gRPC ---------------------------------------------------------------------------------

    def _client(self, answer: Answer, name: str) -> KServeClient:
        return self._kserve[(int(name, 16) + answer.returns) % len(self._kserve)]

    async def _over_grpc(
        self, request: dict[str, Any], answer: Answer, name: str, tenant: str
    ) -> None:
        model, inputs, outputs = kserve_body(request, self.model)
        with passing():
            reply = await self._client(answer, name).infer(model, inputs, outputs=outputs)
        answer.first_s = time.monotonic()
        answer.content = [(each, reply.output(each).tolist()) for each in outputs]

    async def _over_grpc_stream(
        self, request: dict[str, Any], answer: Answer, name: str, tenant: str
    ) -> None:
        model, inputs, outputs = kserve_body(request, self.model)
        inputs = [*inputs, NamedTensor("stream", np.array([True]))]
        texts: list[bytes] = [b""] * request["n"]
        reasons: list[list[bytes]] = [[] for _ in texts]
        with passing():
            stream = self._client(answer, name).stream(model, inputs, outputs=outputs)
            async with contextlib.aclosing(stream) as replies:
                async for reply in replies:
                    answer.first_s = answer.first_s or time.monotonic()
                    if request.get("leaves"):
                        return
                    for index, piece in enumerate(reply.output("text_output").tolist()):
                        texts[index] += piece
                    for index, reason in enumerate(reply.output("finish_reason").tolist()):
                        if reason != b"None":
                            reasons[index].append(reason)
        if any(not each for each in reasons):
            answer.faults.add("gaps")
        answer.content = list(zip(texts, [each[-1:] for each in reasons], strict=True))


_PASSING = frozenset({"UNAVAILABLE", "INTERNAL", "CANCELLED", "UNKNOWN", "RESOURCE_EXHAUSTED"})


@contextlib.contextmanager
def passing() -> Iterator[None]:
    """Raise Passing for errors of gRPC after which a client tries again."""
    try:
        yield
    except KServeError as error:
        if error.status.name in _PASSING and error.code not in REFUSALS:
            raise Passing(f"{error.code}: {error}") from None
        raise


def check(status: int, text: str) -> None:
    """Raise Passing or Lost unless a call has succeeded."""
    if status == 200:
        return
    code = str(status)
    with contextlib.suppress(ValueError, KeyError, TypeError):
        code = json.loads(text)["error"]["code"]
    if status in PASSING and code not in REFUSALS:
        raise Passing(f"{status}: {text[:150]}")
    raise Lost(code, text[:200])


_STRUCTURED = {"json_schema": "json", "lark": "grammar", "regex": "regex"}


def _sampling(request: dict[str, Any]) -> dict[str, Any]:
    """Return sampling parameters by vLLM's names."""
    sampling = dict(request["sampling"])
    if constraint := sampling.pop("constraint", None):
        ((name, value),) = constraint.items()
        sampling["structured_outputs"] = {_STRUCTURED[name]: value}
    return sampling


def http_body(request: dict[str, Any], model: str) -> tuple[str, dict[str, Any]]:
    """Return path and body of a request over HTTP."""
    body: dict[str, Any] = {"model": request.get("model") or model}
    if embed := request.get("embed"):
        return "/v1/embeddings", body | {"input": request["prompt"], **embed}
    if request.get("background"):
        sampling = dict(request["sampling"])
        schema = sampling.pop("constraint")["json_schema"]
        form = {"type": "json_schema", "name": "person", "schema": schema}
        body |= {"input": request["prompt"], "background": True, "text": {"format": form}}
        return "/v1/responses", body | {"max_output_tokens": sampling.pop("max_tokens"), **sampling}
    body |= {"n": request["n"], "stream": request["stream"], **_sampling(request)}
    body |= {"return_token_ids": True, "return_weight_versions": True}
    if not request.keys() & {"tools", "images", "thinking"}:
        return "/v1/completions", body | {"prompt": request["prompt"]}
    content: list[dict[str, Any]] = [{"type": "text", "text": request["prompt"][:80]}]
    for image in request.get("images", ()):
        data = f"data:image/png;base64,{image['data']}"
        content.insert(0, {"type": "image_url", "image_url": {"url": data}})
        content[-1]["text"] = content[-1]["text"].replace("<image>", "")
    for name in ("logprobs", "prompt_logprobs"):
        body.pop(name, None)
    body["messages"] = [{"role": "user", "content": content}]
    if tools := request.get("tools"):
        body |= {"tools": tools, "tool_choice": "required"}
    if budget := request.get("thinking"):
        body |= {"reasoning_effort": "low", "thinking_token_budget": budget}
    return "/v1/chat/completions", body


def kserve_body(
    request: dict[str, Any], model: str
) -> tuple[str, list[NamedTensor], Sequence[str]]:
    """Return the model, inputs and outputs of a request over gRPC."""
    model = request.get("model") or model
    inputs = [text_tensor("text_input", request["prompt"])]
    if embed := request.get("embed"):
        inputs.append(text_tensor("sampling_parameters", json.dumps(embed)))
        return f"{model}.embed", inputs, ("embedding",)
    if images := request.get("images"):
        inputs.append(text_tensor("image", *[each["data"] for each in images]))
    sampling = _sampling(request) | {"n": request["n"]}
    sampling.pop("prompt_logprobs", None)
    inputs.append(text_tensor("sampling_parameters", json.dumps(sampling)))
    outputs = ["text_output", "finish_reason"]
    if sampling.get("logprobs"):
        outputs.append("logprobs")
    return model, inputs, outputs
