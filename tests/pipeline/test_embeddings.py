"""Embeddings of the engine and of the pipeline."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch
from torch import Tensor

from nano_inference import (
    EmbedParams,
    EngineConfig,
    InferenceEngine,
    Pipeline,
    RequestError,
    SamplingParams,
)
from nano_inference.config import ModelError, PoolingKind
from nano_inference.pipeline.scoring import EmbeddedPrompt
from nano_inference.stages.batching import BatchingCore, SequenceStatus
from nano_inference.stages.executor.core import ExecutorCore
from nano_inference.stages.streaming.core import StreamingCore

from ..soaking import in_soak
from ..stages.executor.encoders import CAUSAL, ENCODERS, MOST, VOCAB, make_base, vector_of
from ..stages.executor.models import make_model
from . import reference
from .builders import break_once, raises
from .conftest import MakeConfig

# --- engine ----------------------------------------------------------------------------------


KINDS: tuple[PoolingKind, ...] = get_args(PoolingKind)
LENGTHS = (1, 2, 3, 17, 16, 50, 120, 33, 34, 35, 64, 5)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SMALL: dict[str, Any] = {"max_batch_size": 8, "block_size": 4, "kv_cache_bytes": 1 << 22}


def prompts_of(seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, VOCAB) for _ in range(length)] for length in LENGTHS]


@cache
def decoder(name: str) -> Any:
    """With heads as wide as our kernels take, so that all of them have part where they fit."""
    return make_model(name, head_dim=32)


def saved(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


def engine_of(model_path: str, **settings: Any) -> InferenceEngine:
    return InferenceEngine(EngineConfig(model_path=model_path, device="cpu", **SMALL | settings))


def hold(found: Tensor, base: Any, prompts: list[list[int]], kind: str, **how: Any) -> None:
    """The vectors are Transformers', and not all the same."""
    wanted = torch.stack([vector_of(base, prompt, kind, **how) for prompt in prompts])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * max(1, float(wanted.abs().max())))
    assert len(prompts) == 1 or float((wanted[0] - wanted[-1]).abs().max()) > 1e-2


# --- models that generate, too ------------------------------------------------------------------


EVERY_DAY = {
    ("qwen3", 8, "radix"),
    ("gemma2", 8, "radix"),
    ("mistral", 2048, "paged"),
    ("gpt_oss", 2048, "paged"),
}


@pytest.mark.parametrize(
    ("name", "budget", "cache_type"),
    [
        parts if parts in EVERY_DAY else in_soak(*parts)
        for parts in product(
            ("qwen3", "gemma2", "mistral", "gpt_oss"), (8, 2048), ("radix", "paged")
        )
    ],
)
def test_vectors_of_a_decoder_are_transformers_own(
    name: str, budget: int, cache_type: Literal["radix", "paged"], tmp_path: Path
) -> None:
    """Beside requests that generate, which get the tokens that they get alone; then again, when
    the cache knows all prompts."""
    model, prompts = decoder(name), prompts_of()
    path = saved(model, tmp_path)
    settings: dict[str, Any] = {"max_tokens_per_batch": budget, "cache_type": cache_type}
    with engine_of(path, **settings) as engine:
        alone = [sample.completion_tokens for sample in engine.generate(prompts[:4], GREEDY)]
        for kind in KINDS:
            ids = [engine.add_request(prompt, GREEDY) for prompt in prompts[:4]]
            hold(engine.embed(prompts, pooling=kind), model.base_model, prompts, kind)
            samples = {}
            while engine.has_pending():
                samples |= {sample.request_id: sample for sample in engine.step()}
            assert [samples[each].completion_tokens for each in ids] == alone
        engine._batching.check()


def test_a_preempted_prompt_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five times, in the middle, beside others that decode."""
    model, prompts = decoder("qwen3"), prompts_of()
    embedded = [prompts[6], prompts[9]]
    with engine_of(saved(model, tmp_path), max_tokens_per_batch=8) as engine:
        for prompt in prompts[:3]:
            engine.add_request(prompt, GREEDY)
        advance, preempted = engine._advance, [0]

        def preempting() -> Any:
            pooling = [seq for seq in engine._batching.running if seq.pools and seq.num_computed]
            if pooling and pooling[0].num_computed > 10 and preempted[0] < 5:
                preempted[0] += 1
                engine._batching._leave(pooling[0], SequenceStatus.WAITING, "preemption")
            return advance()

        monkeypatch.setattr(engine, "_advance", preempting)
        hold(engine.embed(embedded, pooling="mean"), model.base_model, embedded, "mean")
        assert preempted == [5]


@pytest.mark.parametrize("how", [{"normalize": False}, {"dimensions": 7}])
def test_length_and_dimensions_follow_the_parameters(how: dict[str, Any], tmp_path: Path) -> None:
    model, prompts = decoder("qwen3"), prompts_of()[3:6]
    with engine_of(saved(model, tmp_path)) as engine:
        found = engine.embed(prompts, pooling="mean", **how)
        hold(found, model.base_model, prompts, "mean", **how)
        assert found.shape == (3, how.get("dimensions", model.config.hidden_size))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_mode_gives_a_vector_the_same_bits_in_any_company(
    dtype: Literal["float32", "bfloat16"], tmp_path: Path
) -> None:
    """And however its prompt is cut."""
    prompts = prompts_of()
    path = saved(decoder("qwen3"), tmp_path)
    settings: dict[str, Any] = {"deterministic": True, "dtype": dtype, "max_model_len": 128}
    with engine_of(path, max_tokens_per_batch=21, **settings) as engine:
        together = [engine.embed(prompts, pooling=kind) for kind in KINDS]
    with engine_of(path, **settings) as engine:
        for kind, vectors in zip(KINDS, together, strict=True):
            alone = torch.cat([engine.embed([prompt], pooling=kind) for prompt in prompts])
            assert torch.equal(vectors, alone), kind


# --- models without an output layer -------------------------------------------------------------


LIKE_OTHERS = ("xlm-roberta", "distilbert", "electra", "gemma2")
"""Models whose layers another one of every day has, here or above."""


@pytest.mark.parametrize(
    "name", [in_soak(each) if each in LIKE_OTHERS else each for each in (*ENCODERS, *CAUSAL)]
)
def test_vectors_of_a_base_model_are_transformers_own(name: str, tmp_path: Path) -> None:
    base, prompts = make_base(name), prompts_of()
    with engine_of(saved(base, tmp_path), max_tokens_per_batch=128) as engine:
        assert engine._executor.capacity().capabilities == ("embed",)
        for kind in KINDS:
            hold(engine.embed(prompts, pooling=kind), base, prompts, kind)
        usual = "mean" if name in ENCODERS else "last"
        hold(engine.embed(prompts), base, prompts, usual)
        engine._batching.check()
        with raises("cannot_generate", "generates nothing"):
            engine.generate([prompts[0]])


def test_a_model_serves_its_role_alone(tmp_path: Path) -> None:
    folder = saved(decoder("qwen3"), tmp_path / "decoder")
    with engine_of(folder, role="embed") as engine:
        assert engine.embed([[5, 6]]).shape[0] == 1
        with raises("cannot_generate"):
            engine.generate([[5, 6]])
    with engine_of(folder, role="generate") as engine:
        assert engine.generate([[5, 6]], GREEDY)[0].completion_tokens
        with raises("cannot_embed"):
            engine.embed([[5, 6]])
    with pytest.raises(ModelError, match="generates nothing"):
        engine_of(saved(make_base("bert"), tmp_path / "encoder"), role="generate")


@pytest.mark.parametrize(("name", "longest"), [("bert", MOST), ("roberta", MOST - 2)])
def test_a_prompt_may_be_as_long_as_the_model_has_positions(
    name: str, longest: int, tmp_path: Path
) -> None:
    base = make_base(name)
    prompt = [random.Random(0).randrange(2, VOCAB) for _ in range(longest)]
    with engine_of(saved(base, tmp_path)) as engine:
        hold(engine.embed([prompt]), base, [prompt], "mean")
        with raises("prompt_too_long"):
            engine.embed([[*prompt, 5]])


@pytest.mark.parametrize("padding", [None, -1])
def test_a_model_need_have_no_token_for_padding(padding: int | None, tmp_path: Path) -> None:
    base, prompts = make_base("bert"), prompts_of()[7:10]
    base.config.pad_token_id = padding
    with engine_of(saved(base, tmp_path)) as engine:
        hold(engine.embed(prompts), base, prompts, "mean")


def test_a_prompt_that_can_t_be_cut_has_to_fit_a_step(tmp_path: Path) -> None:
    with engine_of(saved(make_base("bert"), tmp_path), max_tokens_per_batch=50) as engine:
        assert engine.embed([[7] * 50]).shape == (1, 48)
        with pytest.raises(RequestError, match="context length is 50 tokens; the prompt has 51"):
            engine.embed([[7] * 51])


def test_masked_and_bidirectional_checkpoints_embed(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    base = make_base("bert")
    masked = AutoModelForMaskedLM.from_config(base.config)
    ahead = AutoModelForCausalLM.from_config(make_base("llama").config)
    prompts = prompts_of()[3:7]
    for name, model in (("masked", masked), ("ahead", ahead)):
        with engine_of(saved(model.eval(), tmp_path / name)) as engine:
            hold(engine.embed(prompts), model.base_model, prompts, "mean")


def test_an_encoder_takes_new_weights_also_after_a_release(tmp_path: Path) -> None:
    base, other, prompts = make_base("bert"), make_base("bert", seed=1), prompts_of()
    with engine_of(saved(base, tmp_path)) as engine:
        engine.embed(prompts)
        engine.update_weights(other.state_dict(), blocking=True)
        hold(engine.embed(prompts), other, prompts, "mean")
        engine.release_memory()
        engine.resume_memory()
        engine.update_weights(base.state_dict(), blocking=True)
        hold(engine.embed(prompts), base, prompts, "mean")


# --- what a folder says -------------------------------------------------------------------------


def sentence_transformers(folder: Path, *modules: str, **pooling: Any) -> None:
    """Makes a folder one of sentence-transformers, with a Pooling module of these settings."""
    types = ["Transformer", *modules]
    listed = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(types)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    for each in listed[1:]:
        (folder / each["path"]).mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


CLS = {
    "word_embedding_dimension": 48,
    "pooling_mode_cls_token": True,
    "pooling_mode_mean_tokens": False,
}


def test_pooling_defaults_to_the_model_folder(tmp_path: Path) -> None:
    base, prompts = make_base("bert"), prompts_of()[2:5]
    path = saved(base, tmp_path)
    sentence_transformers(tmp_path, "Pooling", **CLS)
    with engine_of(path, pooling="last") as engine:
        hold(engine.embed(prompts), base, prompts, "cls", normalize=False)
        hold(engine.embed(prompts, pooling="mean", normalize=True), base, prompts, "mean")


def test_the_setting_decides_if_the_folder_has_no_pooling(tmp_path: Path) -> None:
    base, prompts = make_base("bert"), prompts_of()[2:5]
    with engine_of(saved(base, tmp_path), pooling="cls") as engine:
        hold(engine.embed(prompts), base, prompts, "cls")


@pytest.mark.parametrize(
    ("modules", "pooling", "why"),
    [
        (("Pooling", "Dense"), CLS, "'Dense', which is not applied"),
        (("Pooling",), {"pooling_mode_max_tokens": True}, "pools by"),
        (("Pooling",), {"pooling_mode": "weightedmean"}, "pools by weightedmean"),
        (("Pooling",), CLS | {"include_prompt": False}, "leaves prompts out"),
    ],
)
def test_unsupported_embedding_models_are_refused(
    modules: tuple[str, ...], pooling: dict[str, Any], why: str, tmp_path: Path
) -> None:
    path = saved(make_base("bert"), tmp_path)
    sentence_transformers(tmp_path, *modules, **pooling)
    with pytest.raises(ModelError, match=why):
        engine_of(path)


def test_a_model_that_generates_does_so_though_its_vectors_would_be_wrong(tmp_path: Path) -> None:
    path = saved(decoder("qwen3"), tmp_path)
    sentence_transformers(tmp_path, "Pooling", "Dense", **CLS)
    with engine_of(path) as engine:
        assert engine.generate([[5, 6]], GREEDY)[0].completion_tokens
        with raises("cannot_embed"):
            engine.embed([[5, 6]])


def test_deterministic_mode_is_refused_for_an_encoder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="deterministic mode is for models that generate"):
        engine_of(saved(make_base("bert"), tmp_path), deterministic=True)


# --- what is refused ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceEngine]:
    with engine_of(saved(decoder("qwen3"), tmp_path_factory.mktemp("qwen3"))) as engine:
        yield engine


@pytest.mark.parametrize(
    ("prompt", "how", "code"),
    [
        ([], {}, "empty_prompt"),
        ([VOCAB], {}, "invalid_token_ids"),
        ([5] * 257, {}, "prompt_too_long"),
        ([5], {"dimensions": 0}, "invalid_dimensions"),
        ([5], {"dimensions": 49}, "invalid_dimensions"),
        ([5], {"dimensions": float("nan")}, "invalid_request"),
        ([5], {"pooling": "max"}, "invalid_request"),
        ([5], {"normalize": 3}, "invalid_request"),
    ],
)
def test_a_bad_prompt_or_parameter_is_refused(
    prompt: list[int], how: dict[str, Any], code: str, engine: InferenceEngine
) -> None:
    with raises(code):
        engine.embed([[5, 6], prompt], **how)
    assert not engine.has_pending(), "nothing of the call is left"


def test_no_prompts_give_no_vectors(engine: InferenceEngine) -> None:
    assert engine.embed([]).shape[0] == 0


# --- pipeline --------------------------------------------------------------------------------


TEXTS = ["98 + 25 =", "Story about Emma, a dog and", "12 + 30 =", "Once upon a time " * 20]
MEAN = EmbedParams(pooling="mean")
# So that a prompt takes several steps.
SMALL_PIPELINE = {
    "pipeline__restart_backoff_s": 0.01,
    "engine__max_tokens_per_batch": 40,
    "engine__max_batch_size": 16,
}


def check_texts(found: list[EmbeddedPrompt], texts: list[str]) -> None:
    """They are the vectors that Transformers' base model gives of these texts, one by one."""
    for text, each in zip(texts, found, strict=True):
        ids = reference.tokenizer()(text)["input_ids"]
        wanted = vector_of(reference.model().base_model, ids, "mean")
        torch.testing.assert_close(torch.tensor(each.vector), wanted, rtol=0, atol=1e-5)
        assert (each.prompt_tokens, each.error) == (len(ids), None)


@pytest.mark.parametrize(
    ("make_config", "owner", "method", "after"),
    [
        in_soak("memory", ExecutorCore, "execute", 4),
        ("redis-links", ExecutorCore, "execute", 4),
        in_soak("redis-links", BatchingCore, "absorb", 3),
        in_soak("memory", StreamingCore, "absorb", 3),
        ("redis-links", StreamingCore, "absorb", 3),
    ],
    indirect=["make_config"],
)
async def test_a_failed_stage_is_replaced_and_every_vector_comes(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, after: int
) -> None:
    async with Pipeline(make_config(**SMALL_PIPELINE)) as pipeline:
        break_once(monkeypatch, owner, method, after)
        generating = asyncio.create_task(
            pipeline.complete({"prompt": TEXTS[0], "sampling": {"temperature": 0.0}})
        )
        check_texts(await pipeline.embed(TEXTS * 3, MEAN), TEXTS * 3)
        assert (await generating).status == "done"


async def test_a_refused_input_fails_alone(pipeline: Pipeline) -> None:
    found = await pipeline.embed([TEXTS[0], "", [99_999], TEXTS[1]], MEAN, return_errors=True)
    check_texts([found[0], found[3]], TEXTS[:2])
    errors = [each.error for each in found]
    assert [error and error.code for error in errors] == [
        None,
        "empty_prompt",
        "invalid_token_ids",
        None,
    ]
    assert found[1].vector == ()
    with raises("empty_prompt"):
        await pipeline.embed([TEXTS[0], ""], MEAN)
