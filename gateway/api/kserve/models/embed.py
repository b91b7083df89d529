"""`M.embed`: the vectors of texts, or of token ids."""

from __future__ import annotations

import msgspec

from .....bus.public import EmbedParams
from .....config import Int64, PoolingKind, RequestError
from .....kserve.tensors import ModelSpec, TensorError, TensorSpec
from ....server.http import FieldError, convert
from ....serving.embedding import Prompt
from ....serving.fields import EMPTY
from ..served import Answer, ModelCall
from .inputs import SAMPLING, sampling_body, sampling_place, token_ids_of
from .lane import Lane
from .tensors import numbers, rows

TEXT = "text_input"
INPUT_IDS = "input_ids"
EMBEDDING = "embedding"
NUM_INPUT_TOKENS = "num_input_tokens"
WEIGHT_VERSION = "weight_version"


class EmbedBody(msgspec.Struct, frozen=True):
    """The parameters that there are."""

    pooling: PoolingKind | None = None
    normalize: bool | None = None
    dimensions: Int64 | None = None


def embed_spec(model: str) -> ModelSpec:
    """What it takes and gives; `model` is the engine's. Vectors are `[texts, dimensions]`."""
    return ModelSpec(
        name=f"{model}.embed",
        inputs=(
            TensorSpec(TEXT, "BYTES", (-1,), optional=True),
            TensorSpec(INPUT_IDS, "INT64", (-1,), optional=True),
            TensorSpec(SAMPLING, "BYTES", (1,), optional=True),
        ),
        outputs=(
            TensorSpec(EMBEDDING, "FP32", (-1, -1)),
            TensorSpec(NUM_INPUT_TOKENS, "UINT32", (-1,)),
            TensorSpec(WEIGHT_VERSION, "INT64", (-1,)),
        ),
        allowed_as=model,
    )


class EmbedModel:
    """Gives the vectors of one or several texts, or of the tokens of one prompt."""

    def __init__(self, lane: Lane) -> None:
        self.spec = embed_spec(lane.name)
        self.trouble = lane.trouble
        self._lane = lane

    async def infer(self, call: ModelCall, answer: Answer) -> None:
        params = read_params(call)
        embedded = await self._lane.embed(call, await self._prompts(call), params)
        await answer(
            [
                rows(EMBEDDING, "FP32", [each.vector for each in embedded], 0),
                numbers(NUM_INPUT_TOKENS, "UINT32", [each.prompt_tokens for each in embedded]),
                numbers(WEIGHT_VERSION, "INT64", [each.weight_version for each in embedded]),
            ]
        )

    async def _prompts(self, call: ModelCall) -> list[Prompt]:
        given = call.request.input(TEXT)
        if (given is None) == (call.request.input(INPUT_IDS) is None):
            raise TensorError(f"give one of {TEXT} and {INPUT_IDS}")
        if given is None:
            return [token_ids_of(call.request, INPUT_IDS, await self._lane.max_model_len())]
        if not 0 < given.size <= self._lane.max_samples:
            raise RequestError(
                f"{TEXT} has {given.size} texts; give from 1 to {self._lane.max_samples} "
                "(gateway.max_prompts)",
                code="too_many_prompts" if given.size else "empty_prompt",
            )
        try:
            return [bytes(text).decode() for text in given]
        except UnicodeDecodeError as error:
            raise TensorError(f"{TEXT} is no text in UTF-8: {error.reason}") from None


def read_params(call: ModelCall) -> EmbedParams:
    """How a request wants its prompts pooled.

    Raises:
        RequestError: A parameter is not known, or of the wrong type.
    """
    body, where = sampling_body(call.request), sampling_place(call.request)
    known = EmbedBody.__struct_fields__
    for name, value in body.items():
        if name not in known and value is not None and value not in EMPTY:
            raise FieldError(
                f"{where}.{name} is not supported here: nothing is sampled; leave it out",
                param=f"{where}.{name}",
                code="unsupported",
            )
    given = {name: body[name] for name in known if body.get(name) is not None}
    found = convert(given, EmbedBody, where)
    return EmbedParams(
        pooling=found.pooling or "", normalize=found.normalize, dimensions=found.dimensions
    )
