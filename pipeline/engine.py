"""The engine for Python callers: the stages' cores in a loop, without any stage or bus."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, cast

import torch
from msgspec.structs import replace
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from ..bus.channel import RequestEntry
from ..bus.control import Cancel
from ..bus.messages import Dispatch
from ..bus.public import Completion, EmbedParams
from ..config import (
    BusConfig,
    Config,
    EngineConfig,
    ModelError,
    PoolingKind,
    SamplingParams,
)
from ..stages.admission.core import AdmissionCore
from ..stages.batching import BatchingCore
from ..stages.executor.core import ExecutorCore
from ..stages.executor.runner.weights import WeightGroups
from ..stages.streaming.core import StreamingCore
from ..telemetry import now_ns
from ..text.tokenizer import default_sampling_params, find_tokenizer, stop_token_ids_of
from .engine_adapters import AdapterDoor
from .engine_requests import (
    Finished,
    Unfinished,
    UnfinishedRequests,
    Wanted,
    compare,
    make_request,
    make_sample,
    vectors,
)
from .engine_weights import WeightsDoor
from .prompts import check_prompts, params_of_all, predictions_of_all
from .rollouts import Prompt, RequestId, RolloutEngine, TrainingSample
from .scoring import params_to_score, token_ids_to_score


class InferenceEngine(AdapterDoor, WeightsDoor):
    """Generates in this process, on the caller's thread.

    ```python
    with InferenceEngine(EngineConfig(model_path="tiny")) as engine:
        samples = engine.generate(["98 + 25 ="], SamplingParams(temperature=0))
    ```

    One `step` is what the pipeline's stages do together: the same cores validate, schedule,
    execute and finish, so the two can't give different answers.
    """

    def __init__(
        self, config: EngineConfig | None = None, reference: EngineConfig | None = None
    ) -> None:
        """Loads the model.

        Args:
            config: The model that generates.
            reference: A second model, with memory of its own, that gives every finished sample
                its `ref_logprobs`; the same as `config` for a frozen copy. When None, the one that
                `config.reference_model_path` names.

        Raises:
            ModelError: There is no such model, or it can't be served.
        """
        self.config = own = config or EngineConfig()
        if own.reference_model_path:
            # It is asked here and not by the cores, as it would be in a pipeline.
            own = replace(own, reference_model_path="")
            model_path = self.config.reference_model_path
            reference = reference or replace(own, model_path=model_path, speculation="off")
        self._reference = InferenceEngine(reference) if reference is not None else None
        folder = self.config.model_folder
        tokenizer = find_tokenizer(folder)
        if own.cpu_threads:
            torch.set_num_threads(own.cpu_threads)
        self._core: ExecutorCore | None = ExecutorCore(self.config, now_ns=now_ns)
        self.config = replace(self.config, max_batch_size=self._core.max_batch_size)
        capacity = self._executor.capacity()
        # Results stay in this process, so no bus has to carry them.
        config_of_all = Config(engine=own, bus=BusConfig(max_result_bytes=1 << 62))
        self._admission = AdmissionCore(
            config_of_all, tokenizer, stop_token_ids_of(folder, tokenizer)
        )
        self._admission.set_capacity(capacity)
        # Results come back at once here, so nothing is planned ahead of them.
        self._batching = BatchingCore(self.config, capacity, steps_ahead=1)
        self._streaming = StreamingCore(tokenizer if self._executor.model.generates else None)
        self._requests = UnfinishedRequests()
        self._groups = WeightGroups()
        # Finished while `generate` waited for others; the next `step` returns them.
        self._uncollected: list[Finished] = []
        self._load_adapters()

    def __enter__(self) -> InferenceEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    # --- all at once --------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        num_samples_per_prompt: int = 1,
        *,
        show_progress: bool = False,
        adapter: str = "",
        predictions: Sequence[Prompt | None] | None = None,
    ) -> list[TrainingSample]:
        """Completes prompts.

        Args:
            prompts: Texts, or token ids.
            sampling_params: One for all prompts, or one for each; the defaults when None.
            num_samples_per_prompt: Samples of each prompt; its computation is shared.
            show_progress: Whether to draw a progress bar on standard error.
            adapter: The id of a loaded adapter to complete them with; "" for the model alone.
            predictions: For each prompt what is expected to come, as text or token ids, or None;
                drafts where the engine speculates, and without effect on any token.

        Returns:
            In the order of the prompts, then of the samples.

        Raises:
            RequestError: A prompt or parameter is refused, or there are not as many parameters as
                prompts, or one for all, or not as many predictions, or none; nothing was generated.
            WeightsError: Memory is released, or weights could not be put in place.
        """
        prompts = check_prompts(prompts)
        of_all = params_of_all(sampling_params, len(prompts))
        predicted = predictions_of_all(predictions, len(prompts))
        wanted = [
            Wanted(prompt, params, num_samples_per_prompt, adapter=adapter, prediction=prediction)
            for prompt, params, prediction in zip(prompts, of_all, predicted, strict=True)
        ]
        return compare(self._reference, self._run_all(wanted, show_progress))

    def embed(
        self,
        prompts: Sequence[Prompt],
        *,
        pooling: PoolingKind | Literal[""] = "",
        normalize: bool | None = None,
        dimensions: int | None = None,
        show_progress: bool = False,
        adapter: str = "",
    ) -> Tensor:
        """The vectors of prompts, made of the last hidden states of their tokens.

        Args:
            prompts: Texts, or token ids.
            pooling, normalize, dimensions: As in EmbedParams.
            show_progress: Whether to draw a progress bar on standard error.
            adapter: As in `generate`.

        Returns:
            `[prompts, dimensions]` float32 on the CPU.

        Raises:
            RequestError: A prompt or parameter is refused; nothing was computed.
            WeightsError: Memory is released.
        """
        params = EmbedParams(pooling=pooling, normalize=normalize, dimensions=dimensions)
        wanted = [
            Wanted(prompt, None, embed=params, adapter=adapter) for prompt in check_prompts(prompts)
        ]
        return vectors(self._run_all(wanted, show_progress))

    def score(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[tuple[float, ...]]:
        """The logprobs of given completions under the weights in place.

        Args:
            prompts: Token ids.
            completions: Token ids, at least one for each prompt.
            sampling_params: One for all, or one for each. The temperature is that of the policy,
                as docs/sampling.md says; penalties and logit_bias are left out.

        Returns:
            `[completion]`, float32, for each completion.

        Raises:
            RequestError: A prompt or completion is refused, there are not as many completions as
                prompts, one is empty, or both together are longer than max_model_len less one;
                nothing was computed.
        """
        prompts, completions = token_ids_to_score(prompts, completions)
        only_score = params_to_score(sampling_params, len(prompts))
        pairs = zip(prompts, completions, strict=True)
        scored = self.generate([[*prompt, *completion] for prompt, completion in pairs], only_score)
        return [
            tuple(
                cast(float, logprob)
                for logprob in (sample.prompt_logprobs or ())[-len(completion) :]
            )
            for sample, completion in zip(scored, completions, strict=True)
        ]

    def _run_all(self, wanted: Sequence[Wanted], show_progress: bool) -> list[Finished]:
        """Queues all of these and steps until they have ended: their samples, in order."""
        names: dict[str, None] = {}
        finished: dict[str, list[Finished]] = {}
        try:
            for each in wanted:
                name = self._requests.new_name()
                names[name] = None
                self._queue(name, None, each)
            with Progress(console=Console(stderr=True), disable=not show_progress) as progress:
                bar = progress.add_task("Generating", total=len(names))
                while len(finished) < len(names):
                    for name, samples in self._advance():
                        if name in names:
                            finished[name] = samples
                            progress.advance(bar)
                        else:
                            self._uncollected += samples
        except BaseException:
            for name in names:
                self._abort(name)
            raise
        return [pair for name in names for pair in finished[name]]

    def default_sampling_params(self) -> SamplingParams:
        """How the model's makers advise to sample; never applied unless you pass it on.

        Raises:
            ModelError: The model's generation_config.json can't be read or used.
        """
        return default_sampling_params(self.config.model_folder)

    # --- step by step -------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        num_samples: int = 1,
        *,
        request_id: RequestId | None = None,
        adapter: str = "",
        prediction: Prompt | None = None,
    ) -> RequestId:
        """Queues one request and returns its id, which its samples carry.

        Args:
            prompt: Text, or token ids.
            sampling_params: The defaults when None.
            num_samples: Samples of the prompt; its computation is shared.
            request_id: Any text or integer that no unfinished request has; chosen when None.
            adapter: As in `generate`.
            prediction: What is expected to come; as `predictions` in `generate`.

        Raises:
            RequestError: It is refused; its `code` and message say why.
        """
        if request_id is not None:
            self._requests.check_id(request_id)
        name = self._requests.new_name()
        request_id = name if request_id is None else request_id
        wanted = Wanted(prompt, sampling_params, num_samples, None, adapter, prediction)
        self._queue(name, request_id, wanted)
        return request_id

    def step(self) -> list[TrainingSample]:
        """One scheduling and one forward pass; returns the samples of the requests it finished.

        Raises:
            WeightsError: Memory is released, or weights could not be put in place.
        """
        new = [pair for _, pairs in self._advance() for pair in pairs]
        earlier, self._uncollected = self._uncollected, []
        return compare(self._reference, earlier + new)

    def has_pending(self) -> bool:
        """Whether any request is unfinished, or its samples are still to be collected."""
        return bool(self._requests or self._uncollected)

    def abort(self, request_id: RequestId) -> list[TrainingSample]:
        """Ends a request early.

        Returns:
            Its samples as far as they had come; those cut short have the finish_reason "abort".
            Empty when none had begun, and for an id that is unknown or has ended.
        """
        name = self._requests.name_of(request_id)
        return [] if name is None else self._abort(name)

    # --- the rest -----------------------------------------------------------------------------

    def flush_cache(self) -> None:
        """Forgets all cached prefixes; sequences under way are not disturbed."""
        self._batching.cache.flush()

    def shutdown(self) -> None:
        """Gives the model's and the cache's memory back. A second call does nothing.

        The engine can't be used afterwards: what needs the model raises RuntimeError.
        """
        self._groups.close()
        if self._core is not None:
            self._core.close()
            self._core = None
        if self._reference is not None:
            self._reference.shutdown()

    # --- inside -------------------------------------------------------------------------------

    @property
    def _executor(self) -> ExecutorCore:
        if self._core is None:
            raise RuntimeError("this engine was shut down; make another one")
        return self._core

    def _queue(self, name: str, request_id: RequestId | None, wanted: Wanted) -> None:
        request = make_request(name, wanted)
        now = now_ns()
        new = self._admission.admit(RequestEntry(name, request), now, now)
        self._requests.add(name, Unfinished(new.token_ids, request.sampling, request_id))
        self._batching.add(
            Dispatch(
                info=new.info,
                token_ids=new.token_ids,
                sampling=new.sampling,
                sequences=new.sequences,
                priority=0,
                cache_scope=new.cache_scope,
                prediction=new.prediction,
            )
        )

    def _abort(self, name: str) -> list[TrainingSample]:
        if name not in self._requests:
            return []
        cancel = Cancel(name, name, "cancelled", "cancelled", "aborted")
        self._batching.cancel(cancel)
        ended = self._streaming.end(cancel, now_ns()).ended
        if not ended:
            self._requests.pop(name)
            return []
        return compare(self._reference, self._finished(ended[0].completion)[1])

    def _advance(self) -> list[tuple[str, list[Finished]]]:
        executor = self._executor
        plan = self._batching.plan(now_ns())
        if plan is None:
            if self._requests:
                if self._batching.lacks:
                    raise self._unable()
                raise RuntimeError("requests are unfinished and nothing can run; please report it")
            return []
        try:
            result = executor.execute(plan)
        except ModelError:
            # The weights are broken, and so may be all KV that they made.
            executor.clear()
            self._batching.retract()
            self._batching.cache.flush()
            self._tell_memory()
            raise
        except BaseException:
            # Interrupted, perhaps: the requests wait again, and the next step goes on with them.
            executor.reset()
            self._batching.retract()
            if version := executor.weights.pending_version:
                self._batching.change_weights(version, "keep")
            self._tell_memory()
            raise
        self._batching.absorb(result)
        self._batching.take_report()  # there is no fairness stage that would want to know
        deliveries = self._streaming.absorb(result, now_ns())
        self._batching.stop(deliveries.halts)
        # An aborted request ends once more when its cancellation comes back from the executor.
        finished = [
            self._finished(ended.completion)
            for ended in deliveries.ended
            if ended.completion.request_id in self._requests
        ]
        if refused := executor.weights.take_refused():
            self._uncollected += [pair for _, pairs in finished for pair in pairs]
            raise refused
        return finished

    def _finished(self, completion: Completion) -> tuple[str, list[Finished]]:
        name = completion.request_id
        request = self._requests.pop(name)
        samples = [make_sample(request, completion, sample) for sample in completion.samples]
        return name, [(sample, request.params) for sample in samples]


if TYPE_CHECKING:
    # So that mypy holds the engine against the contract.
    _fulfils: type[RolloutEngine] = InferenceEngine
