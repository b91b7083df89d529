"""`M.embed`: vectors of texts, or of token ids."""

from __future__ import annotations

import msgspec

from .....bus.public import EmbedParams
from .....config import Int64, PoolingKind, RequestError
from .....kserve.tensors import ModelSpec, TensorError, TensorSpec
from ....server.http import convert
from ....serving.embedding import Prompt
from ....serving.fields import EMPTY
from ..served import Answer, ModelCall
from .backend import EngineBackend, numbers, rows
from .inputs import SAMPLING, sampling_body, sampling_place, texts_of, token_ids_of, unsupported

TEXT = TensorSpec("text_input", "BYTES", (-1,), optional=True)
INPUT_IDS = TensorSpec("input_ids", "INT64", (-1,), optional=True)


class EmbedBody(msgspec.Struct, frozen=True):
    """The parameters of a request."""

    pooling: PoolingKind | None = None
    normalize: bool | None = None
    dimensions: Int64 | None = None


class EmbedModel:
    """Returns the vectors `[texts, dimensions]` of texts, or of the tokens of one prompt."""

    def __init__(self, backend: EngineBackend) -> None:
        self.spec = ModelSpec(
            name=f"{backend.name}.embed",
            inputs=(TEXT, INPUT_IDS, SAMPLING),
            outputs=(
                TensorSpec("embedding", "FP32", (-1, -1)),
                TensorSpec("num_input_tokens", "UINT32", (-1,)),
                TensorSpec("weight_version", "INT64", (-1,)),
            ),
            allowed_as=backend.name,
        )
        self.trouble = backend.trouble
        self._backend = backend

    async def infer(self, call: ModelCall, answer: Answer) -> None:
        params = _read_params(call)
        embedded = await self._backend.embed(call, await self._prompts(call), params)
        await answer(
            [
                rows("embedding", "FP32", [each.vector for each in embedded], 0),
                numbers("num_input_tokens", "UINT32", [each.prompt_tokens for each in embedded]),
                numbers("weight_version", "INT64", [each.weight_version for each in embedded]),
            ]
        )

    async def _prompts(self, call: ModelCall) -> list[Prompt]:
        given = call.request.input(TEXT.name)
        if (given is None) == (call.request.input(INPUT_IDS.name) is None):
            raise TensorError(f"give one of {TEXT.name} and {INPUT_IDS.name}")
        if given is None:
            most = await self._backend.max_model_len()
            return [token_ids_of(call.request, INPUT_IDS.name, most)]
        if not 0 < given.size <= self._backend.max_samples:
            raise RequestError(
                f"{TEXT.name} has {given.size} texts; give from 1 to {self._backend.max_samples} "
                "(gateway.max_prompts)",
                code="too_many_prompts" if given.size else "empty_prompt",
            )
        return [*(texts_of(call.request, TEXT.name) or ())]


def _read_params(call: ModelCall) -> EmbedParams:
    """How a request's prompts are pooled.

    Raises:
        RequestError: A parameter is unknown, or has the wrong type.
    """
    body, where = sampling_body(call.request), sampling_place(call.request)
    known = EmbedBody.__struct_fields__
    for name, value in body.items():
        if name not in known and value is not None and value not in EMPTY:
            raise unsupported(f"{where}.{name}", "nothing is sampled")
    found = convert({name: body.get(name) for name in known}, EmbedBody, where)
    return EmbedParams(
        pooling=found.pooling or "", normalize=found.normalize, dimensions=found.dimensions
    )
