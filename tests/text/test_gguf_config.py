"""Fields that a GGUF header has for some models, and Transformers' loader leaves at defaults."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from nano_inference.text.gguf_config import complete
from nano_inference.text.gguf_header import GgufHeader

_27B = {"head_dim": 128, "num_attention_heads": 32}


def completed(kind: str, said: dict[str, Any] | None = None, **fields: Any) -> Any:
    """The configuration after a file with these metadata."""
    config: PreTrainedConfig = CONFIG_MAPPING[kind](**fields)
    architecture = kind.removesuffix("_text").replace("_moe", "moe")
    metadata = {f"{architecture}.{key}": value for key, value in (said or {}).items()}
    metadata["general.architecture"] = architecture
    complete(config, GgufHeader(metadata, {}, 0))
    return AutoConfig.for_model(**config.to_dict())


@pytest.mark.parametrize(
    ("kind", "shape", "scalar"),
    [
        ("gemma2", {"hidden_size": 2304, "head_dim": 256, "num_attention_heads": 8}, 256),
        ("gemma2", {"hidden_size": 3584, "head_dim": 256, "num_attention_heads": 16}, 256),
        ("gemma2", {"hidden_size": 4608, **_27B}, 144),
        ("gemma3_text", {"hidden_size": 640, "head_dim": 256, "num_attention_heads": 4}, 256),
        ("gemma3_text", {"hidden_size": 3840, "head_dim": 256, "num_attention_heads": 16}, 256),
        ("gemma3_text", {"hidden_size": 5376, **_27B}, 168),
    ],
)
def test_a_gemma_scales_attention_by_its_shape(
    kind: str, shape: dict[str, int], scalar: int
) -> None:
    assert completed(kind, **shape).query_pre_attn_scalar == scalar


def test_a_scale_in_the_file_counts() -> None:
    assert completed("gemma3_text", {"attention.scale": 0.125}).query_pre_attn_scalar == 64


@pytest.mark.parametrize(
    ("kind", "said", "field", "value"),
    [
        ("gemma2", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping", 30),
        ("phi3", {"attention.sliding_window": 2047}, "sliding_window", 2047),
        ("mistral", {}, "sliding_window", None),
        ("mistral", {"attention.sliding_window": 4096}, "sliding_window", 4096),
        ("qwen3", {"attention.key_length": 64}, "head_dim", 64),
        ("qwen3_moe", {"expert_feed_forward_length": 1536}, "moe_intermediate_size", 1536),
        (
            "qwen2_moe",
            {"expert_shared_feed_forward_length": 640},
            "shared_expert_intermediate_size",
            640,
        ),
    ],
)
def test_fields_are_those_of_the_file(
    kind: str, said: dict[str, Any], field: str, value: object
) -> None:
    assert getattr(completed(kind, said), field) == value


@pytest.mark.parametrize(
    ("kind", "said", "rotary"),
    [
        ("starcoder2", {"rope.freq_base": 999_999.0}, {"rope_theta": 999_999.0}),
        ("phi3", {"rope.dimension_count": 72}, {"partial_rotary_factor": 0.75}),
        ("nemotron", {"rope.dimension_count": 128}, {"partial_rotary_factor": 1.0}),
    ],
)
def test_rotary_parameters_are_those_of_the_file(
    kind: str, said: dict[str, Any], rotary: dict[str, float]
) -> None:
    found = completed(kind, said).rope_parameters
    assert {name: found[name] for name in rotary} == rotary
