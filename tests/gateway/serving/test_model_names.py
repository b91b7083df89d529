"""Aliases of models: the most specific one counts, in every interface, and each has a model."""

from __future__ import annotations

from typing import Any

import pytest

from nano_inference.config import ConfigError, load_config
from nano_inference.gateway.serving.model_names import alias_of
from nano_inference.store.loaded_adapter import LoadedAdapter

from ..fake import FakeEngine, app_of, http_of, report
from ..interfaces import STREAMED

ALIASES = {
    "claude-*": "tiny",
    "claude-*-4": "four",
    "claude-opus*": "opus",
    "claude-opus-9": "nine",
    "*-mini": "mini",
}


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("claude-opus-9", "nine"),
        ("claude-opus-9x", "opus"),
        ("claude-sonnet-4", "four"),
        ("claude-x-mini", "tiny"),
        ("gpt-mini", "mini"),
        ("-mini", "mini"),
        ("mini", ""),
        ("claude", ""),
        ("", ""),
    ],
)
def test_the_most_specific_alias_counts(name: str, served: str) -> None:
    assert alias_of(name, ALIASES) == served
    assert alias_of(name, dict(reversed(ALIASES.items()))) == served


def test_an_alias_between_its_ends_is_no_overlap() -> None:
    assert alias_of("claude-4", {"claude-*-4": "x"}) == ""
    assert alias_of("claude--4", {"claude-*-4": "x"}) == "x"


@pytest.mark.parametrize(
    ("aliases", "words"),
    [
        ({"a": "b"}, "no such model"),
        ({"a*": "tiny", "b": "a"}, "no such model"),
        ({"a": "b", "b": "a"}, "an alias itself"),
        ({"a": "a"}, "an alias itself"),
        ({"a*b*": "tiny"}, r"at most one \*"),
        ({"a": "tin*"}, r"at most one \*"),
        ({"": "tiny"}, "name of a model"),
        ({"a": ""}, "name of a model"),
        ({"lora": "tiny"}, "a model or adapter has that name"),
    ],
)
def test_an_alias_without_a_model_is_refused_at_start(aliases: Any, words: str) -> None:
    adapters = {"engine.adapters": {"lora": "/lora"}}
    with pytest.raises(ConfigError, match=rf"gateway\.model_aliases.*{words}"):
        app_of(
            FakeEngine(),
            load_config(env={}, overrides=adapters | {"gateway.model_aliases": aliases}),
        )


SETTINGS = {
    "gateway.message_format": "off",
    "engine.adapters": {"claude-lora": "/lora"},
    "gateway.model_aliases": {"claude-*": "tiny", "opus": "claude-lora"},
}


async def test_each_interface_serves_an_alias() -> None:
    """A model's own name counts before a wildcard."""
    engine = FakeEngine()
    engine.stage_reports = [report(adapters=(LoadedAdapter(id="claude-lora", version=1),))]
    names = {"tiny": "", "claude-sonnet": "", "claude-lora": "claude-lora", "opus": "claude-lora"}
    calls = {path: body for path, body in STREAMED.items() if path != "/generate"}
    async with http_of(app_of(engine, SETTINGS)) as http:
        for path, body in calls.items():
            for name, adapter in names.items():
                answer = await http.post(path, json=body | {"model": name, "stream": False})
                assert answer.status_code == 200, answer.text
                assert engine.requests[-1].model == adapter, (path, name)
                # Ollama's answers have the name that the caller wrote.
                own = name if path.startswith("/api/") else adapter or "tiny"
                assert answer.json().get("model", own) == own
            unknown = await http.post(path, json=body | {"model": "gpt"})
            assert "gateway.model_aliases" in unknown.text


async def test_an_adapter_is_not_loaded_under_an_alias() -> None:
    async with http_of(app_of(FakeEngine(), SETTINGS)) as http:
        body = {"lora_name": "claude-new", "lora_path": "/x"}
        error = (await http.post("/load_lora_adapter", json=body)).json()["error"]
        assert (error["code"], error["param"]) == ("invalid_request", "lora_name")


async def test_a_model_s_card_has_its_own_name() -> None:
    async with http_of(app_of(FakeEngine(), SETTINGS)) as http:
        card = (await http.get("/v1/models/claude-sonnet")).json()
        assert card["id"] == "tiny"
