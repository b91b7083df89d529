"""`M.best_of`: calls other models for several samples and their scores, and returns the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from .....config import RequestError, shown
from .....kserve.pool import BufferPool, PoolAcquireTimeout
from .....kserve.tensors import DTYPES, Array, InferRequest, NamedTensor, TensorSpec, text_tensor
from ....server.http import field_error, task_group
from ....serving.services import Services
from ....serving.submissions import TooLate
from ..served import Answer, ModelCall
from ..service import InferenceService
from .backend import (
    SAMPLING,
    EngineModel,
    inherited_parameters,
    numbers,
    read_sampling,
    sampling_body,
    sampling_place,
    token_ids_of,
)
from .engine_models import (
    FINISH_REASON,
    INPUT_IDS,
    LOGPROBS,
    OUTPUT_IDS,
    REF_LOGPROBS,
    WEIGHT_VERSION,
    ScoreModel,
)

BEST_OF = "best_of"
DEFAULT_BEST_OF = 4

POOL_BYTES = 32 << 20
"""Buffers of all calls in flight; only used pages take memory."""

POOL_SLOTS = 512
"""Most calls need one slot, of 64 KiB."""

_ALIGNMENT = 16
"""The most bytes that are skipped before a buffer."""


class _Buffers(NamedTuple):
    """A call's tensors, in one slot."""

    prompt: Array
    output_ids: Array
    logprobs: Array
    weight_version: Array
    scores: Array


class BestOfModel(EngineModel):
    """Samples several completions, and returns the one that the reference model finds likeliest.

    A sample's score is the mean logprob of its tokens at temperature 1, by the reference model if
    there is one, else by the current weights. A sample without tokens has minus infinity.

    The model calls others as a client does: their requests are checked and measured.
    """

    suffix = ".best_of"
    inputs = (INPUT_IDS, TensorSpec(BEST_OF, "INT64", (1,), optional=True), SAMPLING)
    outputs = (
        TensorSpec(OUTPUT_IDS, "INT64", (-1,)),
        TensorSpec(LOGPROBS, "FP32", (-1,)),
        TensorSpec(WEIGHT_VERSION, "INT64", (-1,)),
        TensorSpec(FINISH_REASON, "BYTES", (1,)),
        TensorSpec("score", "FP32", (1,)),
        TensorSpec("scores", "FP32", (-1,)),
    )

    def __init__(self, service: InferenceService, services: Services, pool: BufferPool) -> None:
        """Args: the service of the called models, the engine, and the pool of calls' buffers."""
        super().__init__(services)
        self._service = service
        self._pool = pool
        name = self.spec.allowed_as
        self._tokens, self._score = f"{name}.tokens", f"{name}.score"

    async def trouble(self) -> str:
        states = await self._service.states((self._tokens, self._score))
        return next((f"{each.name}: {each.reason}" for each in states if not each.ready), "")

    async def infer(self, call: ModelCall, answer: Answer) -> None:
        if call.key is not None:
            raise RequestError(
                f"{self.spec.name} makes several calls, and takes no idempotency key; call "
                f"{self._tokens} and {self._score}, each with a key",
                code="unsupported",
            )
        request, max_model_len = call.request, await self._services.length.get()
        samples, max_tokens = self._read(request)
        prompt = token_ids_of(request, INPUT_IDS.name, max_model_len)
        longest = max(1, min(max_tokens, max_model_len - len(prompt)))
        ids, floats = DTYPES["INT64"], DTYPES["FP32"]
        shapes: list[tuple[Sequence[int], np.dtype[np.generic]]] = [
            ((len(prompt),), ids),
            ((samples, longest), ids),
            ((samples, longest), floats),
            ((samples, longest), ids),
            ((samples,), floats),
        ]
        n_bytes = sum(math.prod(shape) * dtype.itemsize + _ALIGNMENT for shape, dtype in shapes)
        span = -(-n_bytes // self._pool.slot_bytes)
        if span > self._pool.n_slots:
            raise RequestError(
                f"{samples} samples of {longest} tokens take {n_bytes} bytes of buffers, and there "
                f"are {self._pool.n_bytes}; lower {BEST_OF} or max_tokens",
                code="request_too_large",
            )
        try:
            slot = await self._pool.acquire_slot(span, call.call.deadline_ns or 0)
        except PoolAcquireTimeout:
            raise TooLate(call.call, "there was room for its buffers") from None
        with slot:
            buffers = _Buffers(*slot.scratch([*shapes]))
            buffers.prompt[:] = prompt
            outputs = await self._best(call, samples, buffers)
        await answer(outputs)

    def _read(self, request: InferRequest) -> tuple[int, int]:
        """Return the number of samples, and the most tokens of each."""
        n, sampling = read_sampling(request, self._max_samples)
        if n != 1:
            param = f"{sampling_place(request)}.n"
            raise field_error(
                param,
                f"is {shown(n)}; {BEST_OF} is the number of samples, of which one "
                "is returned, so leave it out",
                code="invalid_n",
            )
        given = request.input(BEST_OF)
        samples = DEFAULT_BEST_OF if given is None else int(given[0])
        config = self._services.config
        most, setting = min(
            (self._max_samples, "gateway.max_prompts"),
            (config.admission.max_samples, "admission.max_samples"),
        )
        if not 1 <= samples <= most:
            raise RequestError(
                f"{BEST_OF} is {samples}; it must be from 1 to {most} ({setting})", code="invalid_n"
            )
        return samples, sampling.max_tokens

    async def _best(self, call: ModelCall, samples: int, buffers: _Buffers) -> list[NamedTensor]:
        body = sampling_body(call.request) | {"n": samples}
        found = await self._call(
            call,
            self._tokens,
            NamedTensor(INPUT_IDS.name, buffers.prompt),
            text_tensor(SAMPLING.name, msgspec.json.encode(body)),
        )
        lengths = found["num_output_tokens"].tolist()
        by_sample = {
            OUTPUT_IDS: buffers.output_ids,
            LOGPROBS: buffers.logprobs,
            WEIGHT_VERSION: buffers.weight_version,
        }
        for name, buffer in by_sample.items():
            buffer[:, : max(lengths)] = found[name]
        await self._score_all(call, buffers, lengths)
        best = int(buffers.scores.argmax())
        # Copies, because another call takes the buffers.
        return [
            *(
                NamedTensor(name, buffer[best, : lengths[best]].copy())
                for name, buffer in by_sample.items()
            ),
            text_tensor(FINISH_REASON, found[FINISH_REASON][best]),
            numbers("score", "FP32", [float(buffers.scores[best])]),
            NamedTensor("scores", buffers.scores.copy()),
        ]

    async def _score_all(self, call: ModelCall, buffers: _Buffers, lengths: Sequence[int]) -> None:
        """Score all samples concurrently. The first error cancels the others."""

        async def score(index: int) -> None:
            completion_ids = buffers.output_ids[index, : lengths[index]]
            found = await self._call(
                call,
                self._score,
                NamedTensor(ScoreModel.prompt_ids.name, buffers.prompt),
                NamedTensor(ScoreModel.completion_ids.name, completion_ids),
            )
            logprobs = found.get(REF_LOGPROBS, found[LOGPROBS])
            buffers.scores[index] = float(logprobs.mean())

        buffers.scores[:] = -math.inf
        async with task_group() as group:
            for index, length in enumerate(lengths):
                if length:
                    group.start_soon(score, index)

    async def _call(self, call: ModelCall, model: str, *inputs: NamedTensor) -> dict[str, Array]:
        """Return another model's outputs."""
        parameters = inherited_parameters(call.request)
        request = InferRequest(model_name=model, inputs=inputs, parameters=parameters)
        response = await self._service.infer_once(call.call, request)
        return {each.name: each.data for each in response.outputs}
