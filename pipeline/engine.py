"""The engine for Python callers: the stages' cores in a loop, without any stage or bus."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, cast

import msgspec
from rich.console import Console
from rich.progress import Progress

from ..bus.channel import RequestEntry
from ..bus.control import MEMORY_TAGS, Cancel, MemoryTag
from ..bus.messages import Dispatch
from ..bus.public import (
    Completion,
    CompletionSample,
    FinishReason,
    GenerateRequest,
    TokenLogprob,
)
from ..bus.weights import InFlight
from ..config import (
    BusConfig,
    Config,
    EngineConfig,
    ModelError,
    RequestError,
    SamplingParams,
    WeightsError,
)
from ..stages.admission.core import AdmissionCore
from ..stages.batching import BatchingCore
from ..stages.executor.core import ExecutorCore
from ..stages.streaming.core import StreamingCore
from ..stages.tokenizer import default_sampling_params, load_tokenizer, stop_token_ids_of
from ..telemetry import now_ns

if TYPE_CHECKING:
    from torch import Tensor

Prompt = str | Sequence[int]


class TrainingSample(msgspec.Struct, frozen=True):
    """One completion, with what training needs.

    Attributes:
        prompt_tokens: `[prompt]`.
        completion_tokens: `[completion]`, the stop token included.
        logprobs: `[completion]`, float32; docs/sampling.md says of which distribution.
        ref_logprobs: `[completion]`, the same by the reference model; None when there is none.
        weight_version: Of the weights that made the oldest of these tokens.
        finish_reason: "stop" for a stop token or string, "length" for a limit, "abort".
        weight_versions: (version, index of its first token) for each run of tokens that one
            version made.
        top_logprobs: `[completion]`, the likeliest tokens at each place, when asked for.
        prompt_logprobs: `[prompt]`, None for the first token, when asked for.
        prompt_top_logprobs: `[prompt]`, the likeliest tokens at each place, when asked for.
    """

    prompt_tokens: tuple[int, ...]
    completion_tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ref_logprobs: tuple[float, ...] | None
    weight_version: int
    finish_reason: FinishReason
    weight_versions: tuple[tuple[int, int], ...] = ()
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None
    prompt_logprobs: tuple[float | None, ...] | None = None
    prompt_top_logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None


_Finished = tuple[TrainingSample, SamplingParams]


class InferenceEngine:
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
                its `ref_logprobs`; the same as `config` for a frozen copy.

        Raises:
            ModelError: There is no such model, or it can't be served.
        """
        self.config = config or EngineConfig()
        self._reference = InferenceEngine(reference) if reference is not None else None
        folder = self.config.model_folder
        tokenizer = load_tokenizer(folder)
        self._core: ExecutorCore | None = ExecutorCore(self.config, now_ns=now_ns)
        capacity = self._executor.capacity()
        # Results stay in this process, so no bus has to carry them.
        config_of_all = Config(engine=self.config, bus=BusConfig(max_result_bytes=1 << 62))
        self._admission = AdmissionCore(
            config_of_all, tokenizer, stop_token_ids_of(folder, tokenizer)
        )
        self._admission.set_capacity(capacity)
        # Results come back at once here, so nothing is planned ahead of them.
        self._batching = BatchingCore(self.config, capacity, steps_ahead=1)
        self._streaming = StreamingCore(tokenizer)
        self._unfinished: dict[str, tuple[tuple[int, ...], SamplingParams]] = {}
        # Finished while `generate` waited for others; the next `step` returns them.
        self._uncollected: list[_Finished] = []
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

    # --- all at once --------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        num_samples_per_prompt: int = 1,
        *,
        show_progress: bool = False,
    ) -> list[TrainingSample]:
        """Completes prompts.

        Args:
            prompts: Texts, or token ids.
            sampling_params: One for all prompts, or one for each; the defaults when None.
            num_samples_per_prompt: Samples of each prompt; its computation is shared.
            show_progress: Whether to draw a progress bar on standard error.

        Returns:
            In the order of the prompts, then of the samples.

        Raises:
            RequestError: A prompt or parameter is refused; nothing was generated.
            WeightsError: Memory is released.
            ValueError: As many parameters as prompts are needed, or one for all.
        """
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(sampling_params)} sampling_params")
        request_ids: list[str] = []
        found: dict[str, list[_Finished]] = {}
        try:
            for prompt, params in zip(prompts, sampling_params, strict=True):
                request_ids.append(self.add_request(prompt, params, num_samples_per_prompt))
            self._finish_all(request_ids, found, show_progress)
        except BaseException:
            for request_id in request_ids:
                self.abort(request_id)
            raise
        return self._compare([pair for each in request_ids for pair in found[each]])

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
            RequestError: A prompt or completion is refused, or both together are longer than
                max_model_len less one; nothing was computed.
            ValueError: There are not as many completions as prompts, or one is empty.
        """
        if len(prompts) != len(completions) or not all(completions):
            raise ValueError("give one completion for each prompt, with at least one token")
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        only_score = [
            SamplingParams(
                max_tokens=1, ignore_eos=True, temperature=params.temperature, prompt_logprobs=0
            )
            for params in sampling_params
        ]
        pairs = zip(prompts, completions, strict=True)
        scored = self.generate([[*prompt, *completion] for prompt, completion in pairs], only_score)
        return [
            tuple(cast(float, each) for each in (sample.prompt_logprobs or ())[-len(completion) :])
            for sample, completion in zip(scored, completions, strict=True)
        ]

    def _finish_all(
        self, request_ids: list[str], found: dict[str, list[_Finished]], show_progress: bool
    ) -> None:
        """Steps until all of these have ended, and puts their samples into `found`."""
        wanted = set(request_ids)
        with Progress(console=Console(stderr=True), disable=not show_progress) as progress:
            bar = progress.add_task("Generating", total=len(wanted))
            while len(found) < len(wanted):
                for request_id, samples in self._advance():
                    if request_id in wanted:
                        found[request_id] = samples
                        progress.advance(bar)
                    else:
                        self._uncollected += samples

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
        self._unfinished[request_id] = admitted.token_ids, params
        self._batching.add(
            Dispatch(
                admitted.info, admitted.token_ids, admitted.sampling, admitted.sequences, priority=0
            )
        )
        return request_id

    def step(self) -> list[TrainingSample]:
        """One scheduling and one forward pass; returns the samples of the requests it finished.

        Raises:
            WeightsError: Memory is released.
        """
        earlier, self._uncollected = self._uncollected, []
        new = [pair for _, pairs in self._advance() for pair in pairs]
        return self._compare(earlier + new)

    def has_pending(self) -> bool:
        """Whether any request is unfinished, or its samples are still to be collected."""
        return bool(self._unfinished or self._uncollected)

    def abort(self, request_id: str) -> list[TrainingSample]:
        """Ends a request early.

        Returns:
            Its samples as far as they had come; those cut short have the finish_reason "abort".
            Empty when none had begun, and for an id that is unknown or has ended.
        """
        if request_id not in self._unfinished:
            return []
        cancel = Cancel(request_id, request_id, "cancelled", "cancelled", "aborted")
        self._batching.cancel(cancel)
        ended = self._streaming.end(cancel, now_ns()).ended
        if not ended:
            del self._unfinished[request_id]
            self._admission.finish(request_id, request_id)
            return []
        return self._compare(self._finished(ended[0].completion)[1])

    # --- weights ------------------------------------------------------------------------------

    def update_weights(
        self,
        state_dict: Mapping[str, Tensor],
        blocking: bool = False,
        *,
        in_flight: InFlight = "keep",
        version: int | None = None,
        partial: bool = False,
    ) -> None:
        """Replaces the model's weights; tokens sampled from then on carry the next version.

        What the prefix cache holds from older weights is never used for a sequence that starts
        after the update.

        Args:
            state_dict: The whole model's, by parameter name, on any device and in any dtype.
            blocking: Put in place before this returns; otherwise before the next step, and the
                tensors must not be changed till then.
            in_flight: What becomes of requests under way. keep: they go on from their KV as it
                is. retract: they compute the KV of their tokens again, with the new weights.
                abort: the next step ends them with what they have.
            version: What to count from then on, above the present version; None for the next.
            partial: Whether parameters that are not in `state_dict` stay as they are.

        Raises:
            WeightsError: The weights don't fit the model, or an update waits already; weights and
                version are as they were.
        """
        sync = (
            self._executor.weights.sync_blocking if blocking else self._executor.weights.start_sync
        )
        self._batching.change_weights(sync(state_dict, version, partial=partial), in_flight)

    def state_dict(self) -> dict[str, Tensor]:
        """The weights in place, by parameter name, as `update_weights` takes them; not copies.

        Raises:
            WeightsError: They were released, and no others have come.
        """
        if "weights" in self._executor.memory.lacks:
            raise self._released()
        return self._executor.model.module.state_dict()

    def get_weight_version(self) -> int:
        """The version of the weights in place; 0 are those that were loaded."""
        return self._executor.weights.version

    def flush_cache(self) -> None:
        """Forgets all cached prefixes; sequences under way are not disturbed."""
        self._batching.cache.flush()

    # --- memory -------------------------------------------------------------------------------

    def release_memory(self, tags: Collection[MemoryTag] = MEMORY_TAGS) -> None:
        """Gives memory back to the device, for a trainer that shares it.

        Until all is resumed nothing is generated; requests under way compute their KV again
        afterwards. What is released already stays so, and the reference model keeps its memory.

        Args:
            tags: "kv_cache"; "weights", which are lost: nothing is generated before an update has
                brought all of them. Both when not given.

        Raises:
            WeightsError: There is no such tag, or a weight update waits for the next step.
        """
        memory = self._executor.memory
        memory.begin_release(tags)
        self._batching.change_memory(memory.lacks, tuple(memory.pending))
        if memory.pending:
            self._uncollected += [pair for _, pairs in self._advance() for pair in pairs]

    def resume_memory(self, tags: Collection[MemoryTag] = MEMORY_TAGS) -> None:
        """Takes memory again that was released; what is there already stays as it is.

        Raises:
            WeightsError: There is no such tag; or there is not enough memory (`out_of_memory`),
                and what could not be had is still released.
        """
        memory = self._executor.memory
        try:
            self._executor.resume_memory(tags)
        finally:
            self._batching.change_memory(memory.lacks, tuple(memory.pending))

    def shutdown(self) -> None:
        """Gives the model's and the cache's memory back. A second call does nothing.

        The engine can't be used afterwards: what needs the model raises RuntimeError.
        """
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

    def _advance(self) -> list[tuple[str, list[_Finished]]]:
        executor = self._executor
        plan = self._batching.plan(now_ns())
        if plan is None:
            if self._unfinished:
                if self._batching.lacks:
                    raise self._released()
                raise RuntimeError("requests are unfinished and nothing can run; please report it")
            return []
        try:
            result = executor.execute(plan)
        except ModelError:
            # The weights are broken, and so may be all KV that they made.
            executor.clear()
            self._batching.retract()
            self._batching.cache.flush()
            raise
        except BaseException:
            # Interrupted, perhaps: the requests wait again, and the next step goes on with them.
            executor.reset()
            self._batching.retract()
            if version := executor.weights.pending_version:
                self._batching.change_weights(version, "keep")
            raise
        self._batching.absorb(result)
        self._batching.take_report()  # there is no fairness stage that would want to know
        deliveries = self._streaming.absorb(result, now_ns())
        self._batching.stop(deliveries.halts)
        # An aborted request ends once more when its cancellation comes back from the executor.
        return [
            self._finished(ended.completion)
            for ended in deliveries.ended
            if ended.completion.request_id in self._unfinished
        ]

    def _released(self) -> WeightsError:
        return WeightsError(
            f"nothing can be generated: memory was released ({', '.join(self._batching.lacks)}); "
            "call resume_memory, and after the weights were released update_weights with all of "
            "them",
            code="memory_released",
        )

    def _finished(self, completion: Completion) -> tuple[str, list[_Finished]]:
        request_id = completion.request_id
        prompt, params = self._unfinished.pop(request_id)
        self._admission.finish(request_id, request_id)
        samples = [_sample(prompt, completion, each) for each in completion.samples]
        return request_id, [(sample, params) for sample in samples]

    def _compare(self, finished: list[_Finished]) -> list[TrainingSample]:
        """Adds what the reference model says of samples, if there is one."""
        begun = [pair for pair in finished if pair[0].completion_tokens]
        if self._reference is None or not begun:
            return [sample for sample, _ in finished]
        scores = self._reference.score(
            [sample.prompt_tokens for sample, _ in begun],
            [sample.completion_tokens for sample, _ in begun],
            [params for _, params in begun],
        )
        found = {id(sample): score for (sample, _), score in zip(begun, scores, strict=True)}
        return [
            msgspec.structs.replace(sample, ref_logprobs=found.get(id(sample), ()))
            for sample, _ in finished
        ]


def _sample(
    prompt: tuple[int, ...], completion: Completion, sample: CompletionSample
) -> TrainingSample:
    return TrainingSample(
        prompt_tokens=prompt,
        completion_tokens=sample.token_ids,
        logprobs=sample.logprobs,
        ref_logprobs=None,
        weight_version=sample.weight_version,
        finish_reason=sample.finish_reason,
        weight_versions=sample.weight_versions,
        top_logprobs=sample.top_logprobs,
        prompt_logprobs=completion.prompt_logprobs,
        prompt_top_logprobs=completion.prompt_top_logprobs,
    )
