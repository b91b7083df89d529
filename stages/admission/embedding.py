"""What is checked of a request for a prompt's vector, and what becomes of its parameters."""

from __future__ import annotations

from ...bus.control import ReplicaCapacity
from ...bus.pooling import Pooling
from ...bus.public import EmbedParams, GenerateRequest
from ...config import RequestError, SamplingParams, shown
from ...text.tokenizer import prompt_too_long
from .checks import COMPLETION_BYTES, LOGPROB_BYTES, TOKEN_ID_BYTES

EMBED_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1)
"""Of sequences that end with their prompt. The token, which is never made, is the place of one in
the step that computes the prompt's last."""


def check_embed(request: GenerateRequest, capacity: ReplicaCapacity, model_name: str) -> None:
    """Whether the model does what is asked of it, and nothing is asked that does not go with it.

    Raises:
        RequestError: cannot_embed, cannot_generate, invalid_embed, invalid_dimensions.
    """
    embed = request.embed
    if embed is None:
        if "generate" not in capacity.capabilities:
            raise RequestError(
                f"{model_name} makes embeddings here and generates nothing; ask for those (embed), "
                "or ask another model",
                code="cannot_generate",
            )
        return
    if capacity.embedding is None:
        raise RequestError(
            f"{model_name} makes no embeddings here; leave embed out, or ask another model",
            code="cannot_embed",
        )
    given = {
        "n": request.n != 1,
        "sampling": request.sampling != SamplingParams(),
        "messages": request.messages is not None,
        "prediction": request.prediction is not None,
    }
    for name, is_given in given.items():
        if is_given:
            raise RequestError(
                f"{name} does not go with embed, which gives one vector of one prompt and samples "
                "nothing; leave it out",
                code="invalid_embed",
            )
    size, dimensions = capacity.embedding.size, embed.dimensions
    if dimensions is not None and not 1 <= dimensions <= size:
        raise RequestError(
            f"dimensions is {shown(dimensions)}; it must be from 1 to {size}, or absent",
            code="invalid_dimensions",
        )


def pooling_of(
    embed: EmbedParams, num_prompt_tokens: int, capacity: ReplicaCapacity, max_result_bytes: int
) -> Pooling:
    """What the executor is told, after `check_embed`: what is not said is the model's own.

    Raises:
        RequestError: prompt_too_long, exceeds_kv_capacity, result_too_large.
    """
    own = capacity.embedding
    assert own is not None, "check_embed comes before"
    pooling = Pooling(
        kind=embed.pooling or own.pooling,
        normalize=own.normalize if embed.normalize is None else embed.normalize,
        dimensions=embed.dimensions or own.size,
        whole=own.whole,
    )
    _check_prompt(num_prompt_tokens, pooling.dimensions, capacity, max_result_bytes)
    return pooling


def _check_prompt(
    num_prompt_tokens: int, dimensions: int, capacity: ReplicaCapacity, max_result_bytes: int
) -> None:
    """Whether a prompt can be computed, and the bus carries its vector."""
    most = capacity.max_model_len
    if num_prompt_tokens > most:
        given = f"the prompt has {num_prompt_tokens}"
        raise prompt_too_long(most, given, "shorten it, or cut it into several")
    slots = capacity.num_blocks * capacity.block_size
    if num_prompt_tokens > slots:
        raise RequestError(
            f"the prompt has {num_prompt_tokens} tokens and the lane has {slots} of KV cache; "
            "shorten it, or give the engine more memory",
            code="exceeds_kv_capacity",
        )
    size = COMPLETION_BYTES + num_prompt_tokens * TOKEN_ID_BYTES + dimensions * LOGPROB_BYTES
    if size > max_result_bytes:
        raise RequestError(
            f"the result may have {size} bytes and at most {max_result_bytes} are carried "
            f"(bus.max_result_bytes); ask for fewer dimensions ({dimensions}), or give a shorter "
            f"prompt ({num_prompt_tokens} tokens)",
            code="result_too_large",
        )
