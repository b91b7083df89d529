"""A whole deployment of several models, while one is unloaded, one loaded and one killed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx
import pytest
import torch
import yaml
from redis.asyncio import Redis

from nano_inference import BusClient, Completion
from nano_inference.config import BusConfig, ModelConfig, ModelError, NanoInferenceError

from ..commands import Command, run_command
from ..programs import Ran
from ..stages.executor.models import make_model
from ..stages.executor.runner.adapters.making import make_adapter, merged
from . import reference
from .deployments import eventually

LIMIT_S = 150
MAX_TOKENS = 6
SAMPLING = {"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
VOCAB = 768
"""Of the bundled model, whose tokenizer they have."""

CONCURRENT = 12

KINDS = {"stays": "llama", "leaves": "qwen3", "comes": "olmo2"}
"""The models, which are random and differ in their architecture: what each is asked, another would
answer otherwise."""

ALIASES = {f"{model}-too": model for model in KINDS}

DECLARED, LATER = "declared", "later"
"""Adapters of one model: in its settings, and loaded while the deployment runs."""

ADAPTED = "stays"

NAMES = {model: model for model in KINDS} | ALIASES | {DECLARED: ADAPTED, LATER: ADAPTED}
"""What requests may name, ids, aliases and adapters, and of which model it is."""

INTERFACES = ("http", "http-stream", "bus", "python")

Outcome = Literal["done", "refused"]


class Asked(NamedTuple):
    """A request, when it was sent and when its end came, and how it ended."""

    model: str
    sent_s: float
    ended_s: float
    outcome: Outcome


class Deployment:
    """One that runs: how to ask it, and what the answers have to be."""

    def __init__(
        self, up: Command, client: BusClient, http: httpx.AsyncClient, redis: Redis, prefix: str
    ) -> None:
        self.up = up
        self.client = client
        self._prefix = prefix
        self.http = http
        self._redis = redis

    async def ask(self, interface: str, model: str, prompt: Sequence[int]) -> tuple[int, ...] | str:
        """The tokens of an answer, or the code with which it was refused."""
        request: dict[str, Any] = {
            "model": model,
            "prompt_token_ids": list(prompt),
            "sampling": SAMPLING,
        }
        if interface == "python":
            return _of(await self.client.complete(request))
        if interface == "bus":
            # As a program would that has no code of ours, but for reading the answer.
            fields: Any = {"json": json.dumps(request)}
            entry_id = (await self._redis.xadd(f"{self._prefix}:requests", fields)).decode()
            *_, last = [each async for each in self.client.follow(entry_id, entry_id)]
            assert isinstance(last, Completion)
            return _of(last)
        body = {
            "model": model,
            "prompt": list(prompt),
            "return_token_ids": True,
            "stream": interface == "http-stream",
            **SAMPLING,
        }
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            text = (await response.aread()).decode()
        if response.status_code != 200:
            return str(json.loads(text)["error"]["code"])
        if interface == "http":
            return tuple(json.loads(text)["choices"][0]["token_ids"])
        events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]", text
        chunks = [json.loads(event) for event in events[:-1]]
        if errors := [chunk["error"] for chunk in chunks if "error" in chunk]:
            return str(errors[0]["code"])
        pieces = [each for chunk in chunks for each in chunk["choices"]]
        return tuple(token for piece in pieces for token in piece.get("token_ids") or ())

    async def states(self) -> dict[str, str]:
        return {model.id: model.state for model in await self.client.models()}

    async def executor_of(self, model: str) -> int:
        """The process of a model's executor; 0 when none is ready."""
        ready = (
            report.pid
            for report in await self.client.deployment.reports()
            if (report.model, report.stage, report.state) == (model, "executor", "ready")
        )
        return next(ready, 0)


def _of(completion: Completion) -> tuple[int, ...] | str:
    if completion.error is not None:
        return completion.error.code
    return completion.samples[0].token_ids


@asynccontextmanager
async def deployed(folder: Path, redis_url: str) -> AsyncIterator[Deployment]:
    """`up` with three models, of which one is not loaded yet, behind one gateway."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    prefix = f"test-{uuid.uuid4().hex[:12]}"
    settings = {
        "bus": {"url": redis_url, "prefix": prefix},
        "engine": {"dtype": "float32", "max_batch_size": 8, "kv_cache_bytes": 4 << 20},
        "telemetry": {"log_level": "warning"},
        "models": [
            {
                "id": name,
                "path": str(folder / name),
                "aliases": [alias for alias, model in ALIASES.items() if model == name],
                "adapters": {DECLARED: str(folder / DECLARED)} if name == ADAPTED else {},
                "preload": name != "comes",
            }
            for name in KINDS
        ],
    }
    file = folder / "deployment.yaml"
    file.write_text(yaml.safe_dump(settings))
    up = Command("up", "--config", str(file), "--gateway", str(port), log=folder / "log")
    url = f"http://127.0.0.1:{port}"
    try:
        async with (
            BusClient.connect(BusConfig(url=redis_url, prefix=prefix)) as client,
            httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as http,
            Redis.from_url(redis_url) as redis,
        ):
            made = Deployment(up, client, http, redis, prefix)

            async def is_up() -> bool:
                assert up.poll() is None, (folder / "log").read_text()
                states = await made.states()
                if [states.get("stays"), states.get("leaves")] != ["ready"] * 2:
                    return False
                try:
                    return (await http.get("/v1/models")).status_code == 200
                except httpx.TransportError:
                    return False

            await eventually(is_up)
            yield made
    finally:
        up.kill()
        up.close()


def answers_of(folder: Path, prompts: Sequence[Sequence[int]]) -> dict[str, list[tuple[int, ...]]]:
    """What each name is answered, by Transformers itself; the models are saved."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for seed, (name, kind) in enumerate(KINDS.items()):
        model = make_model(kind, seed=seed + 1, vocab_size=VOCAB)
        model.save_pretrained(folder / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(reference.FOLDER / file, folder / name)
        found[name] = [_greedy(model, prompt) for prompt in prompts]
        for adapter in (DECLARED, LATER) if name == ADAPTED else ():
            adapted = merged(make_adapter(model, len(adapter), folder / adapter))
            found[adapter] = [_greedy(adapted, prompt) for prompt in prompts]
    return found | {alias: found[model] for alias, model in ALIASES.items()}


def _greedy(model: Any, prompt: Sequence[int]) -> tuple[int, ...]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(MAX_TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


class Moments(NamedTuple):
    """Begin and end of an operation."""

    killed: tuple[float, float]
    unloaded: tuple[float, float]
    loaded: tuple[float, float]


async def storm(
    made: Deployment, number: int, answers: dict[str, list[tuple[int, ...]]], prompts: list[Any]
) -> tuple[list[Asked], Moments]:
    """Send requests, some at a time, during three consecutive operations."""
    order = random.Random(21)
    wanted = [
        (
            INTERFACES[index % len(INTERFACES)],
            order.choice(list(NAMES)),
            order.randrange(len(prompts)),
        )
        for index in range(number)
    ]
    order.shuffle(wanted)
    asked: list[Asked] = []
    thirds = [asyncio.Event() for _ in range(3)]
    free = asyncio.Semaphore(CONCURRENT)

    async def ask(interface: str, name: str, which: int) -> None:
        async with free:
            model, sent_s = NAMES[name], time.monotonic()
            answer = await made.ask(interface, name, prompts[which])
            refused = isinstance(answer, str)
            right = answer == ("model_not_loaded" if refused else answers[name][which])
            assert right, (interface, name, answer)
            outcome: Outcome = "refused" if refused else "done"
            asked.append(Asked(model, sent_s, time.monotonic(), outcome))
            for part, event in enumerate(thirds):
                if len(asked) >= number * (part + 1) // 5:
                    event.set()

    async def timed(what: Callable[[], Awaitable[Any]]) -> tuple[float, float]:
        began = time.monotonic()
        await what()
        return began, time.monotonic()

    async def kill() -> None:
        before = await made.executor_of("stays")
        os.kill(before, signal.SIGKILL)

        async def is_back() -> bool:
            return await made.executor_of("stays") not in (0, before)

        await eventually(is_back)

    async def do() -> Moments:
        await thirds[0].wait()
        killing = asyncio.create_task(timed(kill))
        await thirds[1].wait()
        leaves = await made.executor_of("leaves")
        unloaded = await timed(lambda: made.client.unload_model("leaves"))
        with pytest.raises(ProcessLookupError):
            os.kill(leaves, 0)
        await thirds[2].wait()
        loaded = await timed(lambda: made.client.load_model("comes"))
        return Moments(await killing, unloaded, loaded)

    async with asyncio.TaskGroup() as group:
        doing = group.create_task(do())
        for each in wanted:
            group.create_task(ask(*each))
    return asked, doing.result()


def check(asked: Sequence[Asked], moments: Moments) -> None:
    """Every request has ended as it had to, by when it was sent."""
    for each in asked:
        if each.model == "stays":
            assert each.outcome == "done", "one that was killed comes back, and loses nothing"
        elif each.model == "leaves":
            if each.sent_s > moments.unloaded[1]:
                assert each.outcome == "refused"
            elif each.ended_s < moments.unloaded[0]:
                assert each.outcome == "done"
        elif each.ended_s < moments.loaded[0]:
            assert each.outcome == "refused"
        elif each.sent_s > moments.loaded[1]:
            assert each.outcome == "done"


def told(asked: Sequence[Asked], moments: Moments) -> str:
    """For people: how long answers took, of whom something was done to and of the others."""
    took: dict[str, list[float]] = defaultdict(list)
    for each in asked:
        if each.outcome == "done":
            during = each.ended_s > moments.killed[0] and each.sent_s < moments.killed[1]
            took[f"{each.model}{', while one was killed' if during else ''}"].append(
                each.ended_s - each.sent_s
            )
    lines = [
        f"{name}: {len(all_s)} answers, median {sorted(all_s)[len(all_s) // 2]:.3f} s, "
        f"longest {max(all_s):.3f} s"
        for name, all_s in sorted(took.items())
    ]
    lines += [f"{name}: {end - begin:.2f} s" for name, (begin, end) in moments._asdict().items()]
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.soak
async def test_every_request_ends_once_while_models_come_and_go(
    tmp_path: Path, redis_url: str, soak: bool
) -> None:
    """Each is answered by its own model, or refused where that takes none, whichever way it comes:
    over HTTP, streamed or not, by the stream on Redis, from Python. `make soak` has 500."""
    order = random.Random(7)
    prompts = [[order.randrange(3, VOCAB) for _ in range(order.randrange(4, 20))] for _ in range(6)]
    answers = answers_of(tmp_path, prompts)
    for which in range(len(prompts)):
        told_apart = {answers[name][which] for name in (*KINDS, DECLARED, LATER)}
        assert len(told_apart) == len(KINDS) + 2, "they tell models and adapters apart"
    async with asyncio.timeout(LIMIT_S), deployed(tmp_path, redis_url) as made:
        await load_adapter(made, tmp_path / LATER, prompts[0], answers[LATER][0])
        asked, moments = await storm(made, 500 if soak else 30, answers, prompts)
        check(asked, moments)
        sys.stdout.write(f"{told(asked, moments)}\n")
        states = await made.states()
        assert states == {"stays": "ready", "leaves": "unloaded", "comes": "ready"}
        for interface in INTERFACES:
            assert await made.ask(interface, "comes", prompts[0]) == answers["comes"][0]
            for name in ("stays-too", DECLARED, LATER):
                assert await made.ask(interface, name, prompts[0]) == answers[name][0]
            assert await made.ask(interface, "leaves", prompts[0]) == "model_not_loaded"
            refused = await made.ask(interface, "nobody", prompts[0])
            assert refused in ("unknown_model", "model_not_found")
        with pytest.raises(NanoInferenceError, match="no model 'nobody'"):
            await made.client.load_model("nobody")
        broken = ModelConfig(id="broken", path=str(tmp_path / "nothing"))
        with pytest.raises(ModelError, match=broken.path):  # as its process said
            await made.client.load_model(broken)
        await manage_over_http(made)
        assert await made.ask("http", "leaves", prompts[0]) == answers["leaves"][0]
        made.up.terminate()
        assert await asyncio.to_thread(made.up.wait) == 0
        assert set((await made.states()).values()) == {"unloaded"}
    # Whichever stage finds first that the folder is missing.
    assert re.search(r"\nbroken \w+ +nano-inference: ", (tmp_path / "log").read_text())


async def load_adapter(
    made: Deployment, folder: Path, prompt: Sequence[int], answer: tuple[int, ...]
) -> None:
    """By the address of its model; soon its name routes to the model. No name is used twice."""

    async def load(name: str) -> httpx.Response:
        body = {"lora_name": name, "lora_path": str(folder)}
        return await made.http.post(f"/models/{ADAPTED}/v1/load_lora_adapter", json=body)

    for taken in ("leaves", "comes-too", "stays-too"):
        refused = await load(taken)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_exists")
    loaded = await load(LATER)
    assert loaded.status_code == 200, loaded.text

    cards = (await made.http.get("/v1/models")).json()["data"]
    assert {each["id"]: (each["parent"], each["aliases"]) for each in cards} == {
        **{model: (None, [f"{model}-too"]) for model in KINDS},
        **{adapter: (ADAPTED, []) for adapter in (DECLARED, LATER)},
    }

    async def known() -> bool:
        return all([await made.ask(interface, LATER, prompt) == answer for interface in INTERFACES])

    await eventually(known)


async def manage_over_http(made: Deployment) -> None:
    """The commands, by the gateway's URL."""

    async def ran(*arguments: str) -> Ran:
        url = str(made.http.base_url)
        return await asyncio.to_thread(run_command, "models", *arguments, "--url", url)

    async def printed(*arguments: str) -> str:
        done = await ran(*arguments)  # a slow change says so on standard error
        assert done.status == 0, done.stderr
        return done.stdout

    assert await printed("load", "leaves") == "leaves is loaded\n"
    assert await printed("unload", "comes", "--timeout", "30") == "comes is unloaded\n"
    shown = [json.loads(line) for line in (await printed("--json")).splitlines()]
    assert {each["id"]: each["state"] for each in shown} == {
        "stays": "ready",
        "leaves": "ready",
        "comes": "unloaded",
    }
    assert await printed("remove", "comes") == "comes is removed\n"
    refused = await ran("load", "comes")
    assert (refused.status, refused.stdout) == (1, "")
    assert "there is no model 'comes'" in refused.stderr
