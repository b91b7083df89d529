"""A GGUF file in the place of a model's folder: everything that asks the folder something."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from nano_inference import (
    ChatRenderer,
    Constraint,
    EngineConfig,
    Gateway,
    InferenceEngine,
    Pipeline,
    SamplingParams,
)
from nano_inference.text import gguf

from ..gguf_files import nothing, write_gguf
from . import reference
from .builders import error_code
from .conftest import MakeConfig

SUM = "98 + 25 ="
GREEDY = SamplingParams(temperature=0, max_tokens=16)
CHAT = [{"role": "user", "content": "What is 3 + 4?"}]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "kept").mkdir()
    monkeypatch.setattr(gguf, "_cache_folder", lambda: tmp_path / "kept")
    return write_gguf(tmp_path / "sums.Q8_0.gguf", "Q8_0")


def test_the_engine(file: Path) -> None:
    config = EngineConfig(model_path=str(file), reference_model_path=str(file), dtype="float32")
    assert config.model_name == "sums.Q8_0"
    chat = ChatRenderer(str(file))
    prompt = chat.render(CHAT)
    with InferenceEngine(config) as engine:
        sums, said = engine.generate([SUM, prompt.token_ids], GREEDY)
        assert engine.default_sampling_params() == SamplingParams()
        digits = SamplingParams(temperature=0, constraint=Constraint(regex="[5-9]{2}"))
        (forced,) = engine.generate([SUM], digits)
    words = reference.tokenizer()
    assert words.decode(sums.completion_tokens, skip_special_tokens=True).strip() == "123"
    assert sums.finish_reason == said.finish_reason == "stop"
    assert sums.ref_logprobs == pytest.approx(sums.logprobs, abs=1e-4)
    message = chat.read(prompt, said.completion_tokens, said.finish_reason)
    assert "7" in str(message["content"])
    assert len(words.decode(forced.completion_tokens, skip_special_tokens=True)) == 2


async def test_over_http(make_config: MakeConfig, file: Path) -> None:
    config = make_config(engine__model_path=str(file))
    async with (
        Pipeline(config) as pipeline,
        Gateway(pipeline.client, config) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as http,
    ):
        served = (await http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in served] == ["sums.Q8_0"]
        body = {"model": "sums.Q8_0", "temperature": 0, "max_tokens": 32}
        answer = await http.post("/v1/chat/completions", json=body | {"messages": CHAT})
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "stop"
        assert "7" in choice["message"]["content"]
        answer = await http.post("/v1/completions", json=body | {"prompt": SUM})
        assert answer.json()["choices"][0]["text"].strip() == "123"


async def test_without_a_tokenizer(make_config: MakeConfig, file: Path, tmp_path: Path) -> None:
    bare = write_gguf(tmp_path / "bare.gguf", "Q8_0", tokenizer=nothing)
    ids = reference.tokenizer()(SUM).input_ids
    async with Pipeline(make_config(engine__model_path=str(bare))) as pipeline:
        sampling = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
        given = await pipeline.complete({"prompt_token_ids": ids, "sampling": sampling})
        words = reference.tokenizer().decode(given.samples[0].token_ids)
        assert (words.strip(), given.samples[0].text) == ("123", "")
        refused = await pipeline.complete({"prompt": SUM})
        assert error_code(refused) == "no_tokenizer"
