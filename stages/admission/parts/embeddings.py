"""Embeddings: requests for the vector of a prompt."""

from __future__ import annotations

from typing import ClassVar

from ....bus.control import EmbeddingCapacity, ReplicaCapacity
from ....bus.pooling import Pooling
from ....bus.public import GenerateRequest
from ....config import RequestError, SamplingParams, prompt_too_long, shown
from ..checks import COMPLETION_BYTES, LOGPROB_BYTES, TOKEN_ID_BYTES
from . import Part

SAMPLING = SamplingParams(temperature=0.0, max_tokens=1)
"""Sampling of sequences that end with their prompt. The token is never sampled; it stands for the
row of the step that ends the prompt."""


class Embeddings(Part):
    """Checks requests for vectors."""

    fields: ClassVar = ("embed",)

    def __init__(self, model_name: str, max_result_bytes: int) -> None:
        self._model_name = model_name
        self._max_result_bytes = max_result_bytes

    def check(self, request: GenerateRequest, capacity: ReplicaCapacity) -> None:
        """Check that the model makes embeddings, and that the request's fields go together.

        Raises:
            RequestError: cannot_embed, invalid_embed, invalid_dimensions.
        """
        embed = request.embed
        assert embed is not None
        if (own := EmbeddingCapacity.find(capacity.parts)) is None:
            raise RequestError(
                f"{self._model_name} makes no embeddings here; leave embed out, or ask another "
                "model",
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
                    f"{name} does not go with embed, which gives one vector of one prompt and "
                    "samples nothing; leave it out",
                    code="invalid_embed",
                )
        size, dimensions = own.size, embed.dimensions
        if dimensions is not None and not 1 <= dimensions <= size:
            raise RequestError(
                f"dimensions is {shown(dimensions)}; it must be from 1 to {size}, or absent",
                code="invalid_dimensions",
            )

    def pool(
        self, request: GenerateRequest, num_prompt_tokens: int, capacity: ReplicaCapacity
    ) -> tuple[SamplingParams, Pooling]:
        """Return sampling and pooling, after `check`; defaults are the model's own.

        Raises:
            RequestError: prompt_too_long, exceeds_kv_capacity, result_too_large.
        """
        embed, own = request.embed, EmbeddingCapacity.find(capacity.parts)
        assert embed is not None
        assert own is not None, "check comes before"
        pooling = Pooling(
            kind=embed.pooling or own.pooling,
            normalize=own.normalize if embed.normalize is None else embed.normalize,
            dimensions=embed.dimensions or own.size,
            whole=own.whole,
        )
        dimensions, most = pooling.dimensions, capacity.max_model_len
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
        most_bytes = self._max_result_bytes
        if size > most_bytes:
            raise RequestError(
                f"the result may have {size} bytes and at most {most_bytes} are carried "
                f"(bus.max_result_bytes); ask for fewer dimensions ({dimensions}), or give a "
                f"shorter prompt ({num_prompt_tokens} tokens)",
                code="result_too_large",
            )
        return SAMPLING, pooling
