"""A call that names a subfolder of `gateway.adapter_folder` has its adapter loaded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from nano_inference.config import AdapterError
from nano_inference.gateway.serving import lane_state
from nano_inference.store.loaded_adapter import LoadedAdapter

from ..fake import Client, FakeEngine, app_of, http_of, report


class AdapterEngine(FakeEngine):
    """A fake engine that loads at most two adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, str] = {}
        self._report()

    async def load_adapter(self, id: str, folder: str, **_: Any) -> int:
        if len(self.loaded) > 1:
            raise AdapterError("two are loaded", code="adapter_limit")
        self._called("load_adapter", id=id)
        self.loaded[id] = folder
        self._report()
        return 1

    async def unload_adapter(self, id: str, **_: Any) -> None:
        self._called("unload_adapter", id=id)
        del self.loaded[id]
        self._report()

    def _report(self) -> None:
        adapters = tuple(LoadedAdapter(id, 1, folder) for id, folder in self.loaded.items())
        self.stage_reports = [report(adapters=adapters)]


@pytest.fixture
def engine() -> AdapterEngine:
    return AdapterEngine()


@pytest.fixture
async def http(
    engine: AdapterEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Client]:
    monkeypatch.setattr(lane_state, "ASKED_EVERY_S", 0.0)
    for name in ("m_a", "m_b", "m_c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    (tmp_path / "m_empty").mkdir()
    async with http_of(app_of(engine, {"gateway.adapter_folder": str(tmp_path)}), engine) as made:
        yield made


async def posted(http: Client, model: str) -> str:
    """Return the error of a call for a model; "" for none."""
    body = {"model": model, "prompt": [5], "logprobs": True, "return_token_ids": True}
    answer = await http.post("/v1/completions", json=body)
    return "" if answer.status_code == 200 else str(answer.json()["error"]["code"])


async def test_the_adapter_is_loaded_once(http: Client, engine: AdapterEngine) -> None:
    assert not await posted(http, "m_a")
    assert not await posted(http, "m_a")
    assert [each.model for each in engine.requests] == ["m_a", "m_a"]
    assert engine.names == ["load_adapter"]


async def test_one_that_others_have_unloaded_is_loaded_again(
    http: Client, engine: AdapterEngine
) -> None:
    await posted(http, "m_a")
    await engine.unload_adapter("m_a")
    assert not await posted(http, "m_a")
    assert [*engine.loaded] == ["m_a"]


async def test_the_one_used_longest_ago_makes_room(http: Client, engine: AdapterEngine) -> None:
    for name in ("m_a", "m_b", "m_a", "m_c"):
        assert not await posted(http, name)
    assert [*engine.loaded] == ["m_a", "m_c"]
    # Of another folder: none makes room.
    engine.loaded = {"x": "/elsewhere/x", "y": "/elsewhere/y"}
    engine._report()
    assert await posted(http, "m_b") == "adapter_limit"
    assert [*engine.loaded] == ["x", "y"]


@pytest.mark.parametrize("name", ["m_none", "m_empty", "m_a/..", "../m_a", ".", "m_a/"])
async def test_other_names_are_unknown(http: Client, engine: AdapterEngine, name: str) -> None:
    assert await posted(http, name) == "model_not_found"
    assert not engine.names


async def test_without_the_setting_nothing_is_loaded(engine: AdapterEngine) -> None:
    async with http_of(app_of(engine), engine) as http:
        assert await posted(http, "m_a") == "model_not_found"
