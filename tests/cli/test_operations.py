"""The table of operations: each runs over a bus and at a server, and its command says both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from transformers import AutoModelForCausalLM

from nano_inference.cli import dlq, replay, trace  # noqa: F401  (their commands are in the table)
from nano_inference.cli.operations import COMMANDS
from nano_inference.config import Config, EngineConfig, PolicyConfig
from nano_inference.pipeline.operations import OPERATIONS

from ..stages.executor.runner.adapters.making import make_adapter
from . import servers
from .conftest import Run, eventually, gateway_of, serving

MODEL = str(EngineConfig().model_folder)

CALLS: dict[str, tuple[str, ...]] = {
    "weight_version": ("weights", "version"),
    "update_weights": ("weights", "update", "--folder", MODEL),
    "pause": ("pause",),
    "resume": ("resume",),
    "flush_cache": ("flush-cache",),
    "release_memory": ("release-memory", "--tag", "kv_cache"),
    "resume_memory": ("resume-memory",),
    "load_adapter": ("adapters", "load", "a", "{adapter}"),
    "adapters": ("adapters", "list"),
    "unload_adapter": ("adapters", "unload", "a"),
    "kv_session": ("kv-session", "prefetch", "agent-7", "--ttl", "60"),
    "expert_owners": ("experts", "show"),
    "move_experts": ("experts", "move", "0", "1"),
    "roles": ("roles", "show"),
    "update_roles": ("roles", "set", "both"),
    "fairness": ("fairness", "show"),
    "change_fairness": ("fairness", "set", "aging_s=3", "exchange_interval_s=0.05"),
    "tenant_service": ("fairness", "shares"),
    "shards": ("shards",),
    "set_shards": ("shards", "1"),
    "dead_letters": ("dlq", "list"),
    "retry_dead_letters": ("dlq", "retry", "--all"),
    "drop_dead_letters": ("dlq", "drop", "--all"),
}
"""A command line for each operation that ends, in an order in which they can follow."""

REFUSED = {
    "expert_owners": "no executor reports owners of experts",
    "move_experts": "expert_parallel",
    "kv_session": "",
}
"""Operations that a dense model without sessions refuses, with a part of the sentence."""

STREAMS = {"tail", "kv_events"}

OF_RESULTS = {"recorded", "digest", "digests"}
"""Operations whose commands are in `test_addresses`."""


@pytest.fixture(scope="module")
def served(redis_url: str) -> Iterator[Config]:
    """A pipeline for these tests alone, since its weights and settings change."""
    with serving(redis_url) as config:
        yield config


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A running `serve`."""
    folder = tmp_path_factory.mktemp("serve")
    with servers.served(folder, "--set", "engine.dtype=float32") as (_, url):
        yield url


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> str:
    made: Path = tmp_path_factory.mktemp("adapter")
    make_adapter(AutoModelForCausalLM.from_pretrained(MODEL), 0, made, r=2)
    return str(made)


def test_the_table_is_whole() -> None:
    assert {row.operation for row in COMMANDS} == set(OPERATIONS)
    assert CALLS.keys() | STREAMS | OF_RESULTS == OPERATIONS.keys()
    assert {name for name, each in OPERATIONS.items() if each.streams} == STREAMS


@pytest.mark.parametrize("name", [*CALLS])
def test_an_operation_has_the_same_output_at_both(
    run: Run, place: list[str], adapter: str, name: str
) -> None:
    eventually(lambda: run("roles", "show", *place).status == 0)  # at the first heartbeat
    if name == "adapters":
        eventually(lambda: "a " in run("adapters", "list", *place).stdout)
    words = [word.format(adapter=adapter) for word in CALLS[name]]
    ran = run(*words, *place)
    sentence = REFUSED.get(name)
    if name == "set_shards" and place:  # `serve` has a bus in memory
        sentence = "a bus in memory has one requests queue"
    if sentence is not None:
        assert ran.status in (1, 2), ran
        assert sentence in ran.stdout + ran.stderr
        return
    assert ran.status == 0, ran
    as_json = run(*words, "--json", *place)
    if name not in ("unload_adapter",):  # a second time there is none
        assert as_json.status == 0, as_json
        for line in as_json.stdout.splitlines():
            json.loads(line)


def test_reads_print_the_same_at_both(run: Run, on_served: Config, url: str) -> None:
    for place in ([], ["--url", url]):  # which other tests may have changed
        assert run("fairness", "set", "aging_s=2.5", *place).status == 0
    for words in (("weights", "version"), ("roles", "show"), ("fairness", "show"), ("shards",)):
        over_bus, at_server = run(*words, "--json"), run(*words, "--json", "--url", url)
        assert over_bus == at_server
        assert over_bus.status == 0
        assert run(*words) == run(*words, "--url", url)


def test_an_operation_refuses_an_unknown_argument(url: str) -> None:
    path = f"{url}/admin/operations/pause"
    refused = httpx.post(path, json={"in_flight": "keep", "lanes": "0"})
    assert refused.status_code == 400
    assert "lanes" in refused.json()["error"]["message"]
    assert httpx.post(path, json={"in_flight": "forget"}).status_code == 400
    assert httpx.post(path, json={"model": "other"}).json()["error"]["code"] == "unknown_model"


def test_an_operation_needs_its_scope(
    run: Run, on_served: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANO_INFERENCE_POLICY__BACKEND", "bus")

    def key(scope: str) -> str:
        return run("admin", "keys", "create", scope, "--scope", scope).stdout.strip()

    keys = {scope: key(scope) for scope in ("read", "generate", "weights", "admin")}
    with gateway_of(on_served, policy=PolicyConfig(backend="bus")) as url:
        for name, operation in OPERATIONS.items():
            if operation.streams:
                continue
            for scope, secret in keys.items():
                # A malformed argument is refused after the scope is checked.
                answer = httpx.post(
                    f"{url}/admin/operations/{name}",
                    json={"no_such": 1},
                    headers={"Authorization": f"Bearer {secret}"},
                )
                allowed = operation.scope in ("read", scope)
                assert answer.status_code == (400 if allowed else 403), (name, scope)
