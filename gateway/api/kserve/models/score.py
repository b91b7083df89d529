"""`M.score`: how likely the weights in place, and the reference model, find tokens."""

from __future__ import annotations

from .....kserve.tensors import ModelSpec, TensorSpec
from .....pipeline.scoring import params_to_score, scored_completion, token_ids_to_score
from ....server.http import EngineError
from ....serving.submissions import ENDED_EARLY
from ..served import Answer, ModelCall
from .inputs import SAMPLING, Sampling, read_sampling, token_ids_of
from .lane import Lane
from .tensors import numbers

PROMPT_IDS = "prompt_ids"
COMPLETION_IDS = "completion_ids"
LOGPROBS = "logprobs"
REF_LOGPROBS = "ref_logprobs"
WEIGHT_VERSION = "weight_version"


def score_spec(model: str) -> ModelSpec:
    """What it takes and gives; `model` is the engine's. Logprobs are `[completion]`."""
    return ModelSpec(
        name=f"{model}.score",
        inputs=(
            TensorSpec(PROMPT_IDS, "INT64", (-1,)),
            TensorSpec(COMPLETION_IDS, "INT64", (-1,)),
            TensorSpec(SAMPLING, "BYTES", (1,), optional=True),
        ),
        outputs=(
            TensorSpec(LOGPROBS, "FP32", (-1,)),
            TensorSpec(REF_LOGPROBS, "FP32", (-1,)),
            TensorSpec(WEIGHT_VERSION, "INT64", (1,)),
        ),
        allowed_as=model,
    )


class ScoreModel:
    """Gives the logprobs of a completion's tokens behind a prompt.

    Of the sampling parameters the temperature counts. Where there is a reference model, its
    logprobs are there, too.
    """

    def __init__(self, lane: Lane) -> None:
        self.spec = score_spec(lane.name)
        self.trouble = lane.trouble
        self._lane = lane

    async def infer(self, call: ModelCall, answer: Answer) -> None:
        lane = self._lane
        given = read_sampling(call.request, 1)
        most = await lane.max_model_len()
        prompt = token_ids_of(call.request, PROMPT_IDS, most)
        completion_ids = token_ids_of(call.request, COMPLETION_IDS, most)
        token_ids_to_score([prompt], [completion_ids])
        (params,) = params_to_score(given.params, 1)
        request = await lane.request(call, (*prompt, *completion_ids), Sampling(1, params))
        completion = await lane.complete(call, request)
        if completion.prompt_logprobs is None:
            raise EngineError(ENDED_EARLY.message, code=ENDED_EARLY.code)
        scored = scored_completion(completion, len(completion_ids))
        outputs = [
            numbers(LOGPROBS, "FP32", scored.logprobs),
            numbers(WEIGHT_VERSION, "INT64", [scored.weight_version]),
        ]
        if scored.ref_logprobs is not None:
            outputs.append(numbers(REF_LOGPROBS, "FP32", scored.ref_logprobs))
        await answer(outputs)
