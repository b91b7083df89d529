"""`M.tokens`: token ids for token ids, with what a trainer wants to know of each."""

from __future__ import annotations

from collections.abc import Sequence

from .....config import SamplingParams
from .....kserve.tensors import InferRequest, ModelSpec, NamedTensor, TensorSpec
from ....server.http import FieldError
from ..served import Answer, ModelCall
from .inputs import SAMPLING, flag_of, read_sampling, sampling_place, token_ids_of
from .lane import Lane
from .parts import Part, parts_of
from .tensors import counts, finish_reasons, rows

INPUT_IDS = "input_ids"
STREAM = "stream"
OUTPUT_IDS = "output_ids"
NUM_OUTPUT_TOKENS = "num_output_tokens"
LOGPROBS = "logprobs"
REF_LOGPROBS = "ref_logprobs"
FINISH_REASON = "finish_reason"
WEIGHT_VERSION = "weight_version"

NO_TOKEN = -1
"""What stands behind the end of a sample that is shorter than the longest: no id, no version."""


def tokens_spec(model: str) -> ModelSpec:
    """What it takes and gives; `model` is the engine's.

    Outputs of two dimensions are `[samples, longest]`, where `num_output_tokens` says how many of a
    row count. Behind them stands `NO_TOKEN`, and 0 among logprobs.
    """
    return ModelSpec(
        name=f"{model}.tokens",
        inputs=(
            TensorSpec(INPUT_IDS, "INT64", (-1,)),
            TensorSpec(SAMPLING, "BYTES", (1,), optional=True),
            TensorSpec(STREAM, "BOOL", (1,), optional=True),
        ),
        outputs=(
            TensorSpec(OUTPUT_IDS, "INT64", (-1, -1)),
            TensorSpec(NUM_OUTPUT_TOKENS, "UINT32", (-1,)),
            TensorSpec(LOGPROBS, "FP32", (-1, -1)),
            TensorSpec(REF_LOGPROBS, "FP32", (-1, -1)),
            TensorSpec(FINISH_REASON, "BYTES", (-1,)),
            TensorSpec(WEIGHT_VERSION, "INT64", (-1, -1)),
        ),
        decoupled=True,
        allowed_as=model,
    )


class TokensModel:
    """Goes on with token ids.

    With several answers each has what is new of all samples; with one it has everything, and the
    logprobs of the reference model where there is one.
    """

    def __init__(self, lane: Lane) -> None:
        self.spec = tokens_spec(lane.name)
        self.trouble = lane.trouble
        self._lane = lane

    async def infer(self, call: ModelCall, answer: Answer) -> None:
        lane = self._lane
        sampling = read_sampling(call.request, lane.max_samples)
        check_no_tops(call.request, sampling.params)
        prompt = token_ids_of(call.request, INPUT_IDS, await lane.max_model_len())
        stream = call.many and bool(flag_of(call.request, STREAM))
        request = await lane.request(call, prompt, sampling, stream=stream)

        async def send(parts: Sequence[Part]) -> None:
            await answer(_outputs(parts))

        if stream:
            await lane.stream(call, request, send)
        else:
            await send(parts_of(await lane.complete(call, request), request.n))


def check_no_tops(request: InferRequest, params: SamplingParams) -> None:
    """Raises FieldError where the likeliest tokens are asked for, for which there is no tensor."""
    if params.logprobs:
        param = f"{sampling_place(request)}.logprobs"
        raise FieldError(
            f"{param} is not supported here: the logprob of each token that is sampled is told, of "
            "no other; leave it out",
            param=param,
            code="unsupported",
        )


def _outputs(parts: Sequence[Part]) -> list[NamedTensor]:
    made = [
        rows(OUTPUT_IDS, "INT64", [part.token_ids for part in parts], NO_TOKEN),
        counts(NUM_OUTPUT_TOKENS, parts),
        rows(LOGPROBS, "FP32", [part.logprobs for part in parts], 0),
        finish_reasons(FINISH_REASON, parts),
        rows(WEIGHT_VERSION, "INT64", [part.weight_versions for part in parts], NO_TOKEN),
    ]
    scored = [part.ref_logprobs for part in parts if part.ref_logprobs is not None]
    if len(scored) == len(parts):
        made.append(rows(REF_LOGPROBS, "FP32", scored, 0))
    return made
