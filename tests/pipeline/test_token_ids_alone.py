"""Models without a tokenizer, and GGUF files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from nano_inference import (
    ChatRenderer,
    Constraint,
    EngineConfig,
    InferenceEngine,
    Pipeline,
    SamplingParams,
)
from nano_inference.bus.public import Completion, CompletionChunk
from nano_inference.text import gguf
from nano_inference.text.tokenizer_files import TOKENIZER_FILES

from ..gguf_files import nothing, write_gguf
from . import reference
from .builders import error_code, raises
from .conftest import MakeConfig, both_buses

# --- no tokenizer ----------------------------------------------------------------------------


PROMPT = [100, 200, 300, 400]
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The bundled model, saved without its tokenizer."""
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
            with raises("no_tokenizer"):
                engine.generate([prompt], params)


@both_buses("redis-links")
async def test_a_lane_streams_token_ids(make_config: MakeConfig, folder: Path) -> None:
    async with Pipeline(make_config(engine__model_path=str(folder))) as pipeline:
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


# --- GGUF ------------------------------------------------------------------------------------


SUM = "98 + 25 ="
SIXTEEN = SamplingParams(temperature=0, max_tokens=16)
CHAT = [{"role": "user", "content": "What is 3 + 4?"}]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "kept").mkdir()
    monkeypatch.setattr(gguf, "_cache_folder", lambda: tmp_path / "kept")
    return write_gguf(tmp_path / "sums.Q8_0.gguf", "Q8_0")


def test_the_engine_reads_gguf(file: Path) -> None:
    config = EngineConfig(model_path=str(file), reference_model_path=str(file), dtype="float32")
    assert config.model_name == "sums.Q8_0"
    chat = ChatRenderer(str(file))
    prompt = chat.render(CHAT)
    with InferenceEngine(config) as engine:
        sums, said = engine.generate([SUM, prompt.token_ids], SIXTEEN)
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


async def test_gguf_without_a_tokenizer_takes_token_ids(
    make_config: MakeConfig, file: Path, tmp_path: Path
) -> None:
    bare = write_gguf(tmp_path / "bare.gguf", "Q8_0", tokenizer=nothing)
    ids = reference.tokenizer()(SUM).input_ids
    async with Pipeline(make_config(engine__model_path=str(bare))) as pipeline:
        sampling = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
        given = await pipeline.complete({"prompt_token_ids": ids, "sampling": sampling})
        words = reference.tokenizer().decode(given.samples[0].token_ids)
        assert (words.strip(), given.samples[0].text) == ("123", "")
        refused = await pipeline.complete({"prompt": SUM})
        assert error_code(refused) == "no_tokenizer"
