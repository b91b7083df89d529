"""A model without a tokenizer: token ids in, token ids out, and a clear word to who sends text."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from nano_inference import (
    Constraint,
    EngineConfig,
    Gateway,
    InferenceEngine,
    Pipeline,
    RequestError,
    SamplingParams,
)
from nano_inference.bus.public import Completion, CompletionChunk
from nano_inference.text.tokenizer import TOKENIZER_FILES

from . import reference
from .builders import error_code
from .conftest import MakeConfig, both_buses

PROMPT = [100, 200, 300, 400]
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The bundled model, of which somebody has saved the weights alone."""
    made = tmp_path / "bare"
    shutil.copytree(reference.FOLDER, made)
    for name in TOKENIZER_FILES:
        (made / name).unlink(missing_ok=True)
    return made


def wanted() -> list[int]:
    with InferenceEngine(EngineConfig(model_path="tiny")) as engine:
        (sample,) = engine.generate([PROMPT], SamplingParams(**GREEDY))
    return list(sample.completion_tokens)


def test_the_engine_takes_token_ids(folder: Path) -> None:
    with InferenceEngine(EngineConfig(model_path=str(folder))) as engine:
        (sample,) = engine.generate([PROMPT], SamplingParams(**GREEDY))
        assert list(sample.completion_tokens) == wanted()
        refused: list[tuple[Any, SamplingParams]] = [
            ("text", SamplingParams()),
            (PROMPT, SamplingParams(stop=("x",))),
            (PROMPT, SamplingParams(constraint=Constraint(regex="a"))),
        ]
        for prompt, params in refused:
            with refused(RequestError, "no_tokenizer"):
                engine.generate([prompt], params)


@both_buses
async def test_a_lane_streams_token_ids(make_config: MakeConfig, folder: Path) -> None:
    config = make_config(engine__model_path=str(folder))
    async with Pipeline(config) as pipeline:
        asked = {"prompt_token_ids": PROMPT, "sampling": GREEDY, "stream": True}
        outputs = [output async for output in pipeline.submit(asked)]
        chunks = [each for each in outputs if isinstance(each, CompletionChunk)]
        assert [token for each in chunks for token in each.token_ids] == wanted()
        (ended,) = (each for each in outputs if isinstance(each, Completion))
        assert (ended.status, ended.samples[0].text) == ("done", "")
        for text in (
            {"prompt": "text"},
            {"messages": [{"role": "user", "content": "text"}]},
            {"prompt_token_ids": PROMPT, "sampling": {"stop": ["x"]}},
        ):
            completion = await pipeline.complete(text)
            assert error_code(completion) == "no_tokenizer"
        # What ends a generation stands in the model's own configuration.
        completion = await pipeline.complete({"prompt_token_ids": PROMPT})
        assert completion.status == "done"


async def test_over_http(make_config: MakeConfig, folder: Path) -> None:
    config = make_config(engine__model_path=str(folder))
    async with (
        Pipeline(config) as pipeline,
        Gateway(pipeline.client, config) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as http,
    ):
        sampling = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
        answer = await http.post(
            "/inference/v1/generate", json={"token_ids": PROMPT, "sampling_params": sampling}
        )
        assert answer.json()["choices"][0]["token_ids"] == wanted()
        answer = await http.post("/v1/completions", json={"prompt": PROMPT, **sampling})
        assert answer.json()["choices"][0]["text"] == ""
        for path, body in (
            ("/v1/completions", {"prompt": "text"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "text"}]}),
            ("/tokenize", {"prompt": "text"}),
        ):
            answer = await http.post(path, json=body)
            assert answer.status_code == 400, answer.text
            assert "tokenizer" in answer.json()["error"]["message"]
