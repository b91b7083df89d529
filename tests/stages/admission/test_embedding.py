"""Requests for a prompt's vector: what they are made of, and which are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from transformers import PreTrainedTokenizerFast

from nano_inference.bus.control import EmbeddingCapacity, ReplicaCapacity
from nano_inference.bus.entries import RequestEntry
from nano_inference.bus.parts.scoring import ReferenceScoring
from nano_inference.bus.pooling import Pooling
from nano_inference.bus.public import ChatMessage, EmbedParams, GenerateRequest
from nano_inference.bus.sections import with_sections
from nano_inference.config import BusConfig, Config, EngineConfig, SamplingParams
from nano_inference.stages.admission.arrivals import Accepted
from nano_inference.stages.admission.core import AdmissionCore

from ...errors import raises
from .test_core import CAPACITY

BOTH: ReplicaCapacity = msgspec.structs.replace(
    CAPACITY,
    capabilities=("generate", "score", "embed"),
    parts=(EmbeddingCapacity(48, "last", True),),
)
ENCODER: ReplicaCapacity = msgspec.structs.replace(
    CAPACITY, capabilities=("embed",), parts=(EmbeddingCapacity(48, "mean", False, whole=True),)
)


def admitted(
    tokenizer: PreTrainedTokenizerFast,
    capacity: ReplicaCapacity = BOTH,
    config: Config | None = None,
    **fields: Any,
) -> Accepted:
    engine = EngineConfig(model_path="/models/tiny-7b", reference_model_path="tiny")
    core = AdmissionCore(config or Config(engine=engine), tokenizer, frozenset({1}))
    core.set_capacity(capacity)
    fields = {"prompt_token_ids": (5, 6, 7), "embed": EmbedParams()} | fields
    return core.admit(RequestEntry("7-0", GenerateRequest(**fields)), 0, 0)


@pytest.mark.parametrize(
    ("capacity", "embed", "pooling"),
    [
        (BOTH, EmbedParams(), Pooling("last", True, 48)),
        (ENCODER, EmbedParams(), Pooling("mean", False, 48, whole=True)),
        (
            ENCODER,
            EmbedParams(pooling="cls", normalize=True, dimensions=5),
            Pooling("cls", True, 5, whole=True),
        ),
    ],
)
def test_pooling_defaults_are_the_models_own(
    capacity: ReplicaCapacity,
    embed: EmbedParams,
    pooling: Pooling,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    opened, request, _ = admitted(tokenizer, capacity, embed=embed)
    assert request.info.pooling == pooling
    assert opened.embeds
    assert (request.sampling.max_tokens, len(request.sequences)) == (1, 1)
    assert not opened.stream, "nothing comes before the Completion"
    assert ReferenceScoring.find(opened.parts) is None, "there is nothing to score"


def test_an_empty_text_has_the_tokens_that_the_tokenizer_adds(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    found = admitted(tokenizer, prompt="", prompt_token_ids=None)
    assert found.admitted.prompt.token_ids == (0,)


def test_a_prompt_may_fill_the_lanes_capacity(tokenizer: PreTrainedTokenizerFast) -> None:
    """64 slots; and the model's length, with no room for a token after it."""
    assert len(admitted(tokenizer, prompt_token_ids=(5,) * 64).admitted.prompt.token_ids) == 64
    short = msgspec.structs.replace(BOTH, max_model_len=20)
    filled = admitted(tokenizer, short, prompt="a" * 19, prompt_token_ids=None)
    assert len(filled.admitted.prompt.token_ids) == 20


@pytest.mark.parametrize(
    ("capacity", "fields", "code"),
    [
        (CAPACITY, {}, "cannot_embed"),
        (ENCODER, {"embed": None}, "cannot_generate"),
        (BOTH, {"n": 2}, "invalid_embed"),
        (BOTH, {"sampling": SamplingParams(max_tokens=1)}, "invalid_embed"),
        (BOTH, {"sampling": SamplingParams(stop=("x",))}, "invalid_embed"),
        (
            BOTH,
            {
                "messages": (ChatMessage(role="user", content="x"),),
                "prompt_token_ids": None,
            },
            "invalid_embed",
        ),
        (BOTH, {"embed": EmbedParams(dimensions=0)}, "invalid_dimensions"),
        (BOTH, {"embed": EmbedParams(dimensions=-1)}, "invalid_dimensions"),
        (BOTH, {"embed": EmbedParams(dimensions=49)}, "invalid_dimensions"),
        (BOTH, {"prompt_token_ids": ()}, "empty_prompt"),
        (
            BOTH,
            {"prompt_token_ids": None, "prompt": "", "add_special_tokens": False},
            "empty_prompt",
        ),
        (BOTH, {"prompt_token_ids": (5,) * 65}, "exceeds_kv_capacity"),
        (BOTH, {"prompt_token_ids": (5,) * 101}, "prompt_too_long"),
        (BOTH, {"prompt_token_ids": None, "prompt": "a" * 100_000}, "prompt_too_long"),
        (BOTH, {"model": "other"}, "unknown_model"),
    ],
)
def test_unsupported_embed_requests_are_refused(
    capacity: ReplicaCapacity, fields: dict[str, Any], code: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    with raises(code):
        admitted(tokenizer, capacity, **fields)


def test_a_vector_that_the_bus_does_not_carry_is_refused(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    config = Config(
        engine=EngineConfig(model_path="/models/tiny-7b"), bus=BusConfig(max_result_bytes=1 << 16)
    )
    wide = with_sections(BOTH, EmbeddingCapacity(4096, "last", True))
    with raises("result_too_large"):
        admitted(tokenizer, wide, config)
    assert admitted(tokenizer, wide, config, embed=EmbedParams(dimensions=2000)).opened.embeds
