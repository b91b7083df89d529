"""The engine for Python callers: the stages' cores in a loop, without any stage or bus."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Literal

import msgspec

from ..bus.channel import RequestEntry
from ..bus.messages import Cancel, Completion, CompletionSample, Dispatch, GenerateRequest
from ..config import Config, EngineConfig, RequestError, SamplingParams
from ..stages.admission.core import AdmissionCore
from ..stages.batching import BatchingCore
from ..stages.executor.core import ExecutorCore
from ..stages.streaming.core import StreamingCore
from ..stages.tokenizer import load_tokenizer, stop_token_ids_of
from ..telemetry import now_ns


class TrainingSample(msgspec.Struct, frozen=True):
    """One completion, with what training needs.

    Attributes:
        prompt_tokens: `[prompt]`.
        completion_tokens: `[completion]`, the stop token included.
        logprobs: `[completion]`, of the policy: log-softmax of the logits after temperature over
            the full vocabulary in float32 (at temperature 0, of temperature 1).
        ref_logprobs: None; there is no reference model.
        weight_version: Of the weights that made the oldest of these tokens.
        finish_reason: "stop" for a stop token or string, "length" for a limit.
    """

    prompt_tokens: tuple[int, ...]
    completion_tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ref_logprobs: tuple[float, ...] | None
    weight_version: int
    finish_reason: Literal["stop", "length", "abort"]


class InferenceEngine:
    """Generates in this process, on the caller's thread.

    ```python
    with InferenceEngine(EngineConfig(model_path="tiny")) as engine:
        samples = engine.generate(["98 + 25 ="], SamplingParams(temperature=0))
    ```

    One `step` is what the pipeline's stages do together: the same cores validate, schedule,
    execute and finish, so the two can't give different answers.
    """

    def __init__(self, config: EngineConfig | None = None) -> None:
        """Loads the model.

        Raises:
            ModelError: There is no such model, or it can't be served.
        """
        self.config = config or EngineConfig()
        folder = self.config.model_folder
        tokenizer = load_tokenizer(folder)
        self._executor = ExecutorCore(self.config, now_ns=now_ns)
        capacity = self._executor.capacity()
        self._admission = AdmissionCore(
            Config(engine=self.config), tokenizer, stop_token_ids_of(folder, tokenizer)
        )
        self._admission.set_capacity(capacity)
        # Results come back at once here, so nothing is planned ahead of them.
        self._batching = BatchingCore(self.config, capacity, steps_ahead=1)
        self._streaming = StreamingCore(tokenizer)
        self._prompts: dict[str, tuple[int, ...]] = {}
        self._next_id = 0

    def __enter__(self) -> InferenceEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        num_samples_per_prompt: int = 1,
    ) -> list[TrainingSample]:
        """Completes prompts.

        Args:
            prompts: Texts, or token ids.
            sampling_params: One for all prompts, or one for each; the defaults when None.
            num_samples_per_prompt: Samples of each prompt; its computation is shared.

        Returns:
            In the order of the prompts, then of the samples.

        Raises:
            RequestError: A prompt or parameter is refused; nothing was generated.
            ValueError: As many parameters as prompts are needed, or one for all.
        """
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(sampling_params)} sampling_params")
        request_ids: list[str] = []
        try:
            for prompt, params in zip(prompts, sampling_params, strict=True):
                request_ids.append(self.add_request(prompt, params, num_samples_per_prompt))
        except RequestError:
            for request_id in request_ids:
                self.abort(request_id)
            raise
        found: dict[str, list[TrainingSample]] = {}
        while len(found) < len(request_ids):
            found.update(self._advance())
        return [sample for request_id in request_ids for sample in found[request_id]]

    def add_request(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        num_samples: int = 1,
    ) -> str:
        """Queues one request and returns its id.

        Raises:
            RequestError: It is refused; its `code` and message say why.
        """
        try:
            # A struct built with values of the wrong type is only found out here.
            params = msgspec.convert(
                msgspec.to_builtins(sampling_params or SamplingParams()), SamplingParams
            )
        except msgspec.ValidationError as error:
            raise RequestError(f"bad sampling_params: {error}") from None
        self._next_id += 1
        request_id = f"engine-{self._next_id}"
        is_text = isinstance(prompt, str)
        request = GenerateRequest(
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=None if is_text else tuple(map(int, prompt)),
            sampling=params,
            n=num_samples,
            stream=False,
            request_id=request_id,
        )
        now = now_ns()
        admitted = self._admission.admit(RequestEntry(request_id, request), now, now)
        self._prompts[request_id] = admitted.token_ids
        self._batching.add(
            Dispatch(
                admitted.info, admitted.token_ids, admitted.sampling, admitted.sequences, priority=0
            )
        )
        return request_id

    def step(self) -> list[TrainingSample]:
        """One scheduling and one forward pass; returns the samples of the requests it finished."""
        return [sample for _, samples in self._advance() for sample in samples]

    def has_pending(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._prompts)

    def abort(self, request_id: str) -> None:
        """Drops a request; unknown ids do nothing."""
        if self._prompts.pop(request_id, None) is not None:
            cancel = Cancel(request_id, request_id, "cancelled", "cancelled", "aborted")
            self._batching.cancel(cancel)
            self._streaming.end(cancel, now_ns())
            self._admission.finish(request_id, request_id)

    def shutdown(self) -> None:
        """Gives the model's and the cache's memory back. The engine can't be used afterwards."""
        del self._executor

    # --- inside -------------------------------------------------------------------------------

    def _advance(self) -> list[tuple[str, list[TrainingSample]]]:
        plan = self._batching.plan(now_ns())
        if plan is None:
            return []
        result = self._executor.execute(plan)
        self._batching.absorb(result)
        deliveries = self._streaming.absorb(result, now_ns())
        self._batching.stop(deliveries.halts)
        # An aborted request ends once more when its cancellation comes back from the executor.
        return [
            self._finished(ended.completion)
            for ended in deliveries.ended
            if ended.completion.request_id in self._prompts
        ]

    def _finished(self, completion: Completion) -> tuple[str, list[TrainingSample]]:
        request_id = completion.request_id
        prompt = self._prompts.pop(request_id)
        self._admission.finish(request_id, request_id)
        return request_id, [_sample(prompt, sample) for sample in completion.samples]


def _sample(prompt: tuple[int, ...], sample: CompletionSample) -> TrainingSample:
    return TrainingSample(
        prompt_tokens=prompt,
        completion_tokens=sample.token_ids,
        logprobs=sample.logprobs,
        ref_logprobs=None,
        weight_version=sample.weight_version,
        finish_reason=sample.finish_reason,
    )
