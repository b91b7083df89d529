"""Real users of a real server, made by deploy/redis-acl.txt: what each may do, and what not."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import re
import shlex
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx
import pytest
from redis import exceptions
from redis.asyncio import Redis

from nano_inference import BusClient
from nano_inference.bus import open_bus
from nano_inference.bus.public import CompletionChunk
from nano_inference.bus.shards import shard_of
from nano_inference.bus.weights import FolderWeights
from nano_inference.config import BusConfig, BusError, FairnessConfig, ModelConfig, load_config
from nano_inference.gateway.gateway import Gateway
from nano_inference.pipeline.pipeline import Pipeline
from nano_inference.pipeline.router import Router
from nano_inference.store.limits import Charge, Limit
from nano_inference.store.redis.keys import Keys
from nano_inference.store.registry import ModelRecord

from ..buses import kit
from ..commands import run_command
from ..errors import raises
from ..soaking import in_soak

ROOT = Path(__file__).parents[2]
RULES = (ROOT / "deploy" / "redis-acl.txt").read_text()
LIMIT_S = 20
USERS = ("client", "operator", "stages")
# What the library asks before it knows where a key is; docs/redis-acl.md names it.
FOR_CLUSTERS = "+cluster|slots +command +readonly"
LONG = {"max_tokens": 2000, "ignore_eos": True}
GREEDY = {"prompt": "98 + 25 =", "sampling": {"temperature": 0}}


class Place(NamedTuple):
    """A server that has the users, and an own first part of all keys."""

    url: str
    prefix: str
    keys: Keys
    nodes: list[Redis]

    def url_of(self, user: str) -> str:
        scheme, _, hosts = self.url.partition("://")
        return f"{scheme}://nano-{user}:CHANGE-ME-{user}@{hosts}"

    def config_of(self, user: str) -> BusConfig:
        return BusConfig(url=self.url_of(user), prefix=self.prefix)

    def http_of(self, user: str) -> BusClient:
        return BusClient.connect(self.config_of(user))

    def plain(self, user: str) -> Redis:
        return Redis.from_url(self.url_of(user), decode_responses=True)

    async def refused(self) -> set[tuple[str, str, str]]:
        """Return the refusals: (user, command or key, "command" or "key")."""
        logs = [await node.acl_log() for node in self.nodes]
        return {
            (entry["username"], entry["object"], entry["reason"]) for log in logs for entry in log
        }


@pytest.fixture(params=[in_soak("redis_url"), "cluster_url"])
async def any_place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    async for place in _place(request.getfixturevalue(request.param)):
        yield place


@pytest.fixture
async def place(redis_url: str) -> AsyncIterator[Place]:
    async for found in _place(redis_url):
        yield found


async def _place(url: str) -> AsyncIterator[Place]:
    prefix = f"test-{uuid.uuid4().hex[:12]}"
    hosts = urlsplit(url).netloc.split(",")
    nodes = [Redis.from_url(f"redis://{host}", decode_responses=True) for host in hosts]
    rules = RULES.replace("nano:", f"{prefix}:")
    for node in nodes:
        for line in rules.splitlines():
            await node.execute_command(*shlex.split(line))
        for user in USERS if len(nodes) > 1 else ():
            await node.execute_command("ACL", "SETUSER", f"nano-{user}", *FOR_CLUSTERS.split())
        await node.execute_command("ACL", "LOG", "RESET")
    yield Place(url, prefix, Keys(prefix), nodes)
    for node in nodes:
        await node.execute_command("ACL", "DELUSER", *(f"nano-{user}" for user in USERS))
        await node.aclose()


def serving(place: Place) -> Pipeline:
    """All stages with the stages' user, every link on the server."""
    return Pipeline(load_config(env={}, overrides=settings_of(place)))


def settings_of(place: Place) -> dict[str, object]:
    return {
        "bus.url": place.url_of("stages"),
        "bus.prefix": place.prefix,
        "bus.links": "redis",
        "engine.dtype": "float32",
        "engine.kv_events": True,
        "telemetry.log_level": "error",
    }


# --- what each needs ------------------------------------------------------------------------------


async def test_a_pipeline_serves_clients_and_obeys_operators(any_place: Place) -> None:
    """A request, a stream, one that is cancelled; pause, resume, versions; and nobody lacks a right
    but for what is said to be dispensable."""
    place = any_place
    async with serving(place) as pipeline, place.http_of("client") as client:
        assert (await client.complete({**GREEDY, "n": 2})).status == "done"
        assert (await client.complete({**GREEDY, "budget_ns": 60_000_000_000})).status == "done"
        long = {**GREEDY, "sampling": LONG}
        entry_id = await client.publish(long)
        async with aclosing(client.bus.results.follow(entry_id, entry_id)) as outputs:
            assert isinstance(await anext(outputs), CompletionChunk)
            await client.cancel(entry_id, entry_id)
            async for output in outputs:
                last = output
        assert last.status == "cancelled"
        assert await client.deployment.trouble() == ""
        async with place.http_of("operator") as operator:
            await operator.pause()
            await operator.resume()
            await operator.cancel_all()
            await operator.update_fairness(FairnessConfig())
            assert await operator.weight_version() == 0
            assert await operator.bus.requests.dead_letters() == []
            async with (
                Gateway(operator, pipeline.config) as gateway,
                httpx.AsyncClient(base_url=gateway.url, timeout=LIMIT_S) as http,
            ):
                assert (await http.post("/generate", json={"text": "98 + 25 ="})).status_code == 200
                assert (await http.get("/get_weight_version")).status_code == 200
            async with aclosing(await operator.bus.results.tail()) as ended:
                await client.complete(GREEDY)
                assert (await anext(ended)).status == "done"
            await (await operator.kv_events()).aclose()
            async with aclosing(await operator.kv_events(kept=True)) as entries:
                assert (await anext(entries)).sequence == 0
    assert await place.refused() <= {
        ("nano-client", "info", "command"),
        ("nano-client", "xrange", "command"),
        ("nano-client", place.keys.requests.decode(), "key"),
    }


async def test_several_models_serve_clients_and_obey_operators(any_place: Place) -> None:
    """Clients and operators publish at the entrance, since neither runs scripts."""
    place = any_place
    specs = [ModelConfig(id=name, path="tiny") for name in "ab"]
    settings = load_config(env={}, overrides=settings_of(place))
    async with place.http_of("stages") as entrance:
        router = asyncio.create_task(Router(entrance.bus).run_forever())
        for spec in specs:
            record = ModelRecord(spec=spec, state="ready", takes_requests=True)
            await entrance.bus.store.models.put(record)
        async with Pipeline(settings.of_model(specs[0])), Pipeline(settings.of_model(specs[1])):
            for user in ("client", "operator", "stages"):
                async with place.http_of(user) as client, client.of_model("b") as of_b:
                    assert (await client.complete({**GREEDY, "model": "a"})).model == "a"
                    assert (await of_b.complete(GREEDY)).model == "b"
                    assert await client.deployment.trouble() == ""
                    entry_id = await of_b.publish({**GREEDY, "sampling": LONG})
                    async with aclosing(client.follow(entry_id, entry_id)) as outputs:
                        assert isinstance(await anext(outputs), CompletionChunk)
                        await client.cancel(entry_id, entry_id)
                        *_, last = [each async for each in outputs]
                    assert last.status == "cancelled"  # type: ignore[union-attr]
            async with place.http_of("operator") as client, client.of_model("b") as operator:
                await operator.pause()
                await operator.resume()
                assert await operator.weight_version() == 0
                assert [each.id for each in await client.models()] == ["a", "b"]
        router.cancel()
        await asyncio.wait({router})
    # What has to be tried to know it; see `test_a_pipeline_serves_clients_and_obeys_operators`.
    entrance_key = place.keys.requests.decode()
    assert await place.refused() <= {
        *((f"nano-{user}", "info", "command") for user in ("client", "operator")),
        *((f"nano-{user}", "eval", "command") for user in ("client", "operator")),
        ("nano-client", "xrange", "command"),
        ("nano-client", entrance_key, "key"),
    }


@pytest.mark.parametrize("user", ["operator", "stages"])
async def test_a_gateway_keeps_calls_with_the_rights_of_either(any_place: Place, user: str) -> None:
    async with any_place.http_of(user) as gateway:
        calls = gateway.bus.store.calls
        await calls.keep("c", b"", 10)
        await calls.note("c", "c", "1-0")
        await calls.mark("c", "resumed")
        assert await calls.claim("n", "c") == "c"
        await calls.attach({"c": "n"}, 10)
        assert await calls.orphaned(1) == []
        assert (await calls.read("c")) is not None
        await calls.detach(["c"])
        await calls.drop("c", "n")
        assert await gateway.bus.store.policy.read("?") is not None
        assert await gateway.bus.store.policy.replace("", b"document")
        assert not await gateway.bus.store.policy.replace("", b"another")
        reservation = await gateway.bus.store.limits.reserve(
            [Charge(Limit("key:a", 1, 60)), Charge(Limit("b", 1))]
        )
        assert reservation.granted
        gateway.bus.store.limits.commit(reservation, [1, 1])
        await gateway.bus.store.history.write(60_000, b"minute", [0])
        assert await gateway.bus.store.history.read() == {60_000: b"minute"}
    assert await any_place.refused() <= {(f"nano-{user}", "info", "command")}


async def test_shards_are_changed_by_operators_and_used_by_clients(any_place: Place) -> None:
    operator, client, stages = (
        open_bus(any_place.config_of(user)) for user in ("operator", "client", "stages")
    )
    tenant = next(name for name in map(str, range(99)) if shard_of(name, 2) == 1)
    try:
        assert await stages.requests.pending() == []
        assert (await operator.requests.set_shards(2)).shards == 2
        tail = await operator.results.tail()
        entry_id = await client.requests.publish({"prompt": "x", "tenant": tenant})
        assert entry_id.endswith("-1")
        (entry,) = await stages.requests.take()
        assert entry.entry_id == entry_id
        assert await operator.requests.shard_lengths() == [0, 1]
        assert await client.requests.shard_lengths() == [0, 1]
        await stages.results.deliver([(entry_id, [kit.done(entry_id, entry_id)])])
        assert (await anext(tail)).entry_id == entry_id
        assert await stages.requests.count_queue(0) == 1
        assert (await client.requests.backlog()).pending == 1
        with pytest.raises(BusError) as refused:
            await client.requests.set_shards(3)
        assert refused.value.code == "not_permitted"
    finally:
        for bus in (operator, client, stages):
            await bus.aclose()
    refusals = await any_place.refused()
    assert {user for user, *_ in refusals} <= {"nano-client"}, refusals


async def test_every_command_of_the_code_is_among_the_stages_rights(place: Place) -> None:
    """So that a command which the tests don't reach can't be forgotten in the file."""
    commands = {name.upper() for name in await place.nodes[0].execute_command("COMMAND LIST")}
    used = set()
    folders = (ROOT / "bus" / "redis", ROOT / "store", ROOT / "store" / "redis")
    for path in (path for folder in folders for path in folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                in_scripts = set(re.findall("'([A-Z]+)'", node.value))
                used |= commands & {node.value, *in_scripts}
    used -= {"READONLY"}  # there it is the beginning of an error
    granted = {
        word[1:].partition("|")[0].upper()
        for line in RULES.splitlines()
        if "nano-stages" in line
        for word in line.split()
        if word.startswith("+")
    }
    assert {"EVAL", "XADD", "XREADGROUP", "XCLAIM", "TIME", "RPUSH"} <= used
    assert used <= granted, used - granted
    in_transactions = {"WATCH", "MULTI", "EXEC", "UNWATCH"}  # which the library sends
    assert granted <= used | in_transactions | {"CLIENT"}, granted - used


async def test_the_commands_of_the_terminal_do_with_these_users(place: Place) -> None:
    """`status` shows a client what it may know; dead letters are an operator's."""

    async def ran(user: str, *arguments: str) -> tuple[int, str]:
        where = ("--bus", place.url_of(user), "--set", f"bus.prefix={place.prefix}")
        ran = await asyncio.to_thread(run_command, *arguments, *where)
        return ran.status, ran.stdout + ran.stderr

    async with serving(place):
        status, letters, refused = await asyncio.gather(
            ran("client", "status"), ran("operator", "dlq", "list"), ran("client", "dlq", "list")
        )
    assert status[0] == 0, status
    assert "pipeline   ready" in status[1]
    assert letters[0] == 0, letters
    assert refused[0] == 2
    assert "may not do this" in refused[1]


# --- what nobody else may touch -------------------------------------------------------------------

NOBODYS = (
    *("FLUSHALL", "FLUSHDB", "CONFIG GET *", "CONFIG SET maxmemory 1", "KEYS *", "SCAN 0"),
    *("ACL LIST", "ACL SETUSER nano-client +@all", "CLIENT KILL TYPE normal", "SHUTDOWN NOSAVE"),
    *("MONITOR", "SCRIPT FLUSH", "FUNCTION FLUSH", "REPLICAOF 127.0.0.1 1", "SWAPDB 0 1"),
    *("PUBLISH nano x", "GET other:key", "SET other:key 1", "XADD other:requests * json {}"),
)
NO_CALLERS = (
    "XREADGROUP GROUP admission thief STREAMS nano:requests >",
    "XACK nano:requests admission 1-0",  # others' work
    "XDEL nano:requests 1-0",
    "DEL nano:requests",
    "XADD {nano:requests}:of:a * json {}",  # past the entrance
    "HSET {nano:requests}:models a {}",  # models that are none
    "HSET {nano:requests}:closed a closed",
    "XADD nano:stages:a * json []",
    "XADD nano:results * json {}",  # forged answers
    "XADD nano:kv_events * batch x",  # caches that are none
    "XADD nano:out:r * json {}",
    "RPUSH nano:reply:x {}",
    "XADD nano:dead * json {}",
    "XADD nano:stages * json []",  # a lane that seems to be well
    "SET nano:weights:0 {}",
    "SET nano:epoch 1",
    "XADD {nano:link:0}:plans * w w m m",
    "EVAL return(1) 0",  # a script that never ends
)
"""Nothing for clients, nor for operators."""

NO_CLIENTS = (
    "XRANGE nano:requests - +",  # others' prompts
    "XREAD STREAMS nano:requests 0",
    "XINFO STREAM nano:requests FULL",
    "XTRIM nano:requests MAXLEN 0",
    "XCLAIM nano:requests admission thief 0 1-0",
    "XGROUP DESTROY nano:requests admission",
    "XRANGE {nano:requests}:of:a - +",
    "HDEL {nano:requests}:closed a",
    "XADD {nano:link:a:0}:control.batching * w w m m",
    "XADD {nano:link:0}:control.models * w w m m",  # loads and unloads
    "EXPIRE nano:requests 1",
    "RENAME nano:requests nano:out:mine",
    "XREAD STREAMS nano:results 0",  # others' answers
    "XRANGE nano:results - +",
    "XREAD STREAMS nano:kv_events 0",  # others' prompts, as tokens
    "XRANGE nano:kv_events - +",
    "EXPIRE nano:out:r 1",
    "DEL nano:out:r",
    "SET nano:own:r 1-0",
    "XRANGE nano:dead - +",
    "XDEL nano:dead 1-0",
    "HSET {nano:requests}:lanes 0 x",
    "HDEL {nano:limits}:held:key g",  # limits of others, and one's own
    "HSET {nano:limits}:window:60:key g x",
    "GET nano:weights:0",
    "HGET nano:policy document",  # who may do what at the gateways
    "HSET nano:policy document {}",
    "DEL nano:policy",
    "XADD {nano:link:0}:control.executor * w w m m",  # weights
    "XADD {nano:link:0}:control.batching * w w m m",  # pause
    "XADD {nano:link:0}:control.fairness * w w m m",
    "XREAD STREAMS {nano:link:0}:plans 0",
    "XRANGE {nano:link:0}:steps.streaming - +",
    "XTRIM {nano:link:0}:plans MAXLEN 0",
    "INFO server",
    "CLIENT LIST",
)
NO_OPERATORS = ("XDEL {nano:requests}:of:a 1-0", "XREAD STREAMS {nano:link:0}:steps.streaming 0")


@pytest.mark.parametrize(
    ("user", "forbidden"),
    [
        ("client", (*NOBODYS, *NO_CALLERS, *NO_CLIENTS)),
        ("operator", (*NOBODYS, *NO_CALLERS, *NO_OPERATORS)),
        ("stages", NOBODYS),
    ],
    ids=USERS,
)
async def test_the_server_refuses_commands_and_keys_of_other_roles(
    place: Place, user: str, forbidden: tuple[str, ...]
) -> None:
    """Each of these, of everybody; NOPERM comes before anything is looked at."""
    allowed = []
    async with place.plain(user) as redis:
        await redis.ping()
        for line in forbidden:
            command = line.replace("nano:", f"{place.prefix}:").split(" ")
            with contextlib.suppress(exceptions.NoPermissionError):
                await redis.execute_command(*command)
                allowed.append(line)
    assert allowed == []


async def test_a_client_without_permission_gets_an_error_at_once(place: Place) -> None:
    """An error with a code comes at once, instead of an endless wait."""
    async with serving(place), place.http_of("client") as client:
        requests = client.bus.requests
        forbidden: tuple[Callable[[], Awaitable[object]], ...] = (
            *(client.pause, client.resume, client.weight_version, client.flush_cache),
            lambda: client.update_weights(FolderWeights("/nowhere")),
            lambda: client.update_fairness(FairnessConfig()),
            lambda: requests.drop_dead_letter("1-0"),
            *(requests.dead_letters, requests.pending, client.bus.results.tail),
        )
        for attempt in forbidden:
            async with asyncio.timeout(LIMIT_S):
                with raises("not_permitted", r"may not do this.*NOPERM.*redis-acl", BusError):
                    await attempt()
        assert (await client.complete(GREEDY)).status == "done", "and may go on"


# --- what these users can't prevent, and the documentation says so --------------------------------


async def test_a_client_with_an_id_can_read_its_output(place: Place) -> None:
    """The outputs are one family of keys; ids that can't be guessed are what separates clients."""
    async with serving(place), place.http_of("client") as owner, place.plain("client") as other:
        await owner.complete({**GREEDY, "request_id": "of-the-owner"})
        key = place.keys.out("of-the-owner")
        assert await other.xrange(key)


async def test_a_client_that_may_publish_can_trim_the_queue(place: Place) -> None:
    """XADD has an option for it, and a list of rights knows no options."""
    async with place.plain("client") as first, place.plain("client") as second:
        await first.execute_command("XADD", place.keys.requests, "*", "json", "{}")
        await second.execute_command(
            *("XADD", place.keys.requests, "MAXLEN", "=", 1, "*", "json", "{}")
        )
        assert await first.execute_command("XLEN", place.keys.requests) == 1
