"""`M.best_of`: asks other models for several samples and their scores, and gives the best one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import anyio
import msgspec
import numpy as np
from numpy.typing import DTypeLike

from .....config import NanoInferenceError, RequestError, shown
from .....kserve.pool import BufferPool, PoolAcquireTimeout
from .....kserve.pool_slot import Shape
from .....kserve.tensors import (
    DTYPES,
    Array,
    InferRequest,
    InferResponse,
    ModelSpec,
    NamedTensor,
    TensorSpec,
)
from ....server.http import EngineError, FieldError
from ..served import Answer, ModelCall
from ..service import InferenceService
from . import score, tokens
from .inputs import (
    SAMPLING,
    passed_on,
    read_sampling,
    sampling_body,
    sampling_place,
    token_ids_of,
)
from .lane import Lane
from .tensors import numbers, texts

BEST_OF = "best_of"
DEFAULT_BEST_OF = 4

POOL_BYTES = 32 << 20
"""The buffers of all calls that are under way; of that memory only what is used is taken."""

POOL_SLOTS = 512
"""Into which it is divided: most calls need one, of 64 KiB."""

_BETWEEN = 16
"""Bytes that may be left out before a buffer, so that it begins where numbers of its size may."""


def best_of_spec(model: str) -> ModelSpec:
    """What it takes and gives; `model` is the engine's. `scores` are those of all samples."""
    return ModelSpec(
        name=f"{model}.best_of",
        inputs=(
            TensorSpec(tokens.INPUT_IDS, "INT64", (-1,)),
            TensorSpec(BEST_OF, "INT64", (1,), optional=True),
            TensorSpec(SAMPLING, "BYTES", (1,), optional=True),
        ),
        outputs=(
            TensorSpec(tokens.OUTPUT_IDS, "INT64", (-1,)),
            TensorSpec(tokens.LOGPROBS, "FP32", (-1,)),
            TensorSpec(tokens.WEIGHT_VERSION, "INT64", (-1,)),
            TensorSpec(tokens.FINISH_REASON, "BYTES", (1,)),
            TensorSpec("score", "FP32", (1,)),
            TensorSpec("scores", "FP32", (-1,)),
        ),
        allowed_as=model,
    )


class BestOfModel:
    """Samples several completions, and gives the one that the reference model finds the likeliest.

    A sample's score is the mean logprob of its tokens at temperature 1, by the reference model
    where there is one, else by the weights in place. Of one without tokens it is minus infinity.

    It reaches the models that it asks as a client does: each checks its request, and is measured.
    """

    def __init__(self, service: InferenceService, lane: Lane, pool: BufferPool) -> None:
        """Args: `service` has the models that it asks; `pool` gives the buffers of each call."""
        self.spec = best_of_spec(lane.name)
        self._service = service
        self._pool = pool
        self._tokens = tokens.tokens_spec(lane.name).name
        self._score = score.score_spec(lane.name).name
        self._max_samples = lane.max_samples
        self._most_at_once = lane.most_at_once
        self._max_model_len = lane.max_model_len

    async def trouble(self) -> str:
        states = await self._service.states((self._tokens, self._score))
        return next((f"{each.name}: {each.reason}" for each in states if not each.ready), "")

    async def infer(self, call: ModelCall, answer: Answer) -> None:
        asked = self._read(call.request, await self._max_model_len())
        n_bytes = asked.n_bytes
        span = -(-n_bytes // self._pool.slot_bytes)
        if span > self._pool.n_slots:
            raise RequestError(
                f"{asked.samples} samples of {asked.longest} tokens take {n_bytes} bytes of "
                f"buffers, and there are {self._pool.n_bytes}; lower {BEST_OF} or max_tokens",
                code="request_too_large",
            )
        try:
            slot = await self._pool.acquire_slot(span, call.origin.deadline_ns or 0)
        except PoolAcquireTimeout:
            raise EngineError(
                f"the call's time ({call.origin.limited_by}) was over before there was room for "
                "its buffers; give it more",
                code="expired",
            ) from None
        with slot:
            buffers = _Buffers(*slot.scratch(asked.buffers))
            buffers.prompt[:] = asked.prompt
            outputs = await self._best(call, asked, buffers)
        await answer(outputs)

    def _read(self, request: InferRequest, max_model_len: int) -> _Asked:
        sampling = read_sampling(request, self._max_samples)
        tokens.check_no_tops(request, sampling.params)
        if sampling.n != 1:
            param = f"{sampling_place(request)}.n"
            raise FieldError(
                f"{param} is {shown(sampling.n)}; one is given of as many as {BEST_OF} says, "
                "so leave it out",
                param=param,
                code="invalid_n",
            )
        given = request.input(BEST_OF)
        samples = DEFAULT_BEST_OF if given is None else int(given[0])
        most, setting = self._most_at_once
        if not 1 <= samples <= most:
            raise RequestError(
                f"{BEST_OF} is {samples}; it must be from 1 to {most} ({setting})",
                code="invalid_n",
            )
        prompt = token_ids_of(request, tokens.INPUT_IDS, max_model_len)
        longest = min(sampling.params.max_tokens, max_model_len - len(prompt))
        return _Asked(prompt, samples, max(1, longest))

    async def _best(self, call: ModelCall, asked: _Asked, buffers: _Buffers) -> list[NamedTensor]:
        body = sampling_body(call.request) | {"n": asked.samples}
        sampled = await self._ask(
            call,
            self._tokens,
            NamedTensor(tokens.INPUT_IDS, buffers.prompt),
            texts(SAMPLING, [msgspec.json.encode(body).decode()]),
        )
        found = {each.name: each.data for each in sampled.outputs}
        lengths = found[tokens.NUM_OUTPUT_TOKENS].tolist()
        for name, buffer in buffers.rows:
            buffer[:, : max(lengths)] = found[name]
        await self._score_all(call, buffers, lengths)
        best = int(buffers.scores.argmax())
        # Copies, since the buffers are soon those of another call.
        made = [
            NamedTensor(name, buffer[best, : lengths[best]].copy()) for name, buffer in buffers.rows
        ]
        reason = found[tokens.FINISH_REASON][best].decode()
        return [
            *made,
            texts(tokens.FINISH_REASON, [reason]),
            numbers("score", "FP32", [float(buffers.scores[best])]),
            NamedTensor("scores", buffers.scores.copy()),
        ]

    async def _score_all(self, call: ModelCall, buffers: _Buffers, lengths: Sequence[int]) -> None:
        """Scores all samples side by side. The first error ends the others."""
        failure: NanoInferenceError | None = None

        async def score_one(index: int) -> None:
            nonlocal failure
            try:
                buffers.scores[index] = await self._score_of(
                    call, buffers.prompt, buffers.output_ids[index, : lengths[index]]
                )
            except NanoInferenceError as error:
                # Not through the group, which would wrap it.
                failure = failure or error
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            for index in range(len(lengths)):
                group.start_soon(score_one, index)
        if failure is not None:
            raise failure

    async def _score_of(self, call: ModelCall, prompt: Array, completion: Array) -> float:
        if not completion.size:
            return -math.inf
        scored = await self._ask(
            call,
            self._score,
            NamedTensor(score.PROMPT_IDS, prompt),
            NamedTensor(score.COMPLETION_IDS, completion),
        )
        found = {each.name: each.data for each in scored.outputs}
        return float(found.get(score.REF_LOGPROBS, found[score.LOGPROBS]).mean())

    async def _ask(self, call: ModelCall, model: str, *inputs: NamedTensor) -> InferResponse:
        request = InferRequest(model_name=model, inputs=inputs, parameters=passed_on(call.request))
        return await self._service.infer_once(call.origin, request)


class _Asked(NamedTuple):
    """What a call asks for.

    Attributes:
        prompt: Its token ids.
        samples: How many completions are made.
        longest: The most tokens that one of them has.
    """

    prompt: tuple[int, ...]
    samples: int
    longest: int

    @property
    def n_bytes(self) -> int:
        """Of all buffers."""
        sizes = [math.prod(shape) * dtype.itemsize + _BETWEEN for shape, dtype in self._buffers]
        return sum(sizes)

    @property
    def buffers(self) -> list[tuple[Shape, DTypeLike]]:
        """Shapes and dtypes of what `_Buffers` has."""
        return [*self._buffers]

    @property
    def _buffers(self) -> list[tuple[tuple[int, ...], np.dtype[np.generic]]]:
        ids, floats = DTYPES["INT64"], DTYPES["FP32"]
        each = (self.samples, self.longest)
        return [
            ((len(self.prompt),), ids),
            (each, ids),
            (each, floats),
            (each, ids),
            ((self.samples,), floats),
        ]


class _Buffers(NamedTuple):
    """Where a call has its tensors: all of them within one slot."""

    prompt: Array
    output_ids: Array
    logprobs: Array
    weight_version: Array
    scores: Array

    @property
    def rows(self) -> list[tuple[str, Array]]:
        """Those with a row for each sample, by the names that they have as outputs."""
        return [
            (tokens.OUTPUT_IDS, self.output_ids),
            (tokens.LOGPROBS, self.logprobs),
            (tokens.WEIGHT_VERSION, self.weight_version),
        ]
