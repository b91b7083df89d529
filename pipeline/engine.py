"""The engine for Python callers: the stages' cores in a loop, without stages or a bus."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from os import PathLike
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal, cast

from msgspec.structs import replace

from ..bus.control import (
    Cancel,
    ControlSession,
    TierCapacity,
    WeightsReady,
)
from ..bus.entries import RequestEntry
from ..bus.public import (
    Completion,
    EmbedParams,
    GenerateRequest,
    KVSession,
    KVSessionResult,
    SessionAction,
)
from ..config import (
    AdmissionConfig,
    BusConfig,
    Config,
    ConfigError,
    EngineConfig,
    ModelError,
    PoolingKind,
    RequestError,
    SamplingParams,
    shown,
)
from ..config.clock import now_ns
from ..config.collector import collector_paused
from ..config.forks import is_forked
from ..stages.admission.core import AdmissionCore
from ..stages.batching import BatchingCore
from ..stages.read_ahead import read_ahead
from ..stages.streaming.core import StreamingCore
from ..stages.streaming.deliveries import EndedRequest
from ..text.tokenizer import default_sampling_params, find_tokenizer, stop_token_ids_of
from .engine_calls import OtherNames, one_at_a_time, says_other_names
from .engine_forks import EngineForks
from .engine_images import EngineImages, find_image_processor
from .engine_parts import ModelParts
from .engine_requests import (
    ArgumentError,
    Finished,
    Unfinished,
    UnfinishedRequests,
    chat_of,
    check_prompts,
    make_request,
    make_requests,
    make_sample,
    params_to_score,
    progress_bar,
    token_ids_to_score,
)
from .engine_tiers import EngineTiers, next_plan
from .engine_weights import EngineWeights
from .rollouts import Prompt, RequestId, RolloutEngine, TrainingSample, completion_of
from .sessions import check_action

if TYPE_CHECKING:
    from torch import Tensor

    from ..stages.executor.core import ExecutorCore
    from .chat_renderer import ChatPrompt
    from .engine_reference import EngineReference
    from .replay import Replay

_MOST_SAMPLES = 1 << 20
"""Most samples of one prompt; as many as run at once share its KV, and the others wait."""


@one_at_a_time
class InferenceEngine(EngineForks, EngineWeights, ModelParts, OtherNames):
    """Generates in this process, on the caller's thread. Calls of several threads take turns.

    ```python
    with InferenceEngine("tiny") as engine:
        (sample,) = engine.generate(["98 + 25 ="], SamplingParams(temperature=0))
    print(sample.text)
    ```

    One `step` does the work of the pipeline's stages with the same cores, so both give the same
    answers. In a fork of the process every call raises ModelError, `forked`.
    """

    @says_other_names
    @collector_paused()
    def __init__(
        self,
        config: EngineConfig | str | PathLike[str] | None = None,
        reference: EngineConfig | str | PathLike[str] | None = None,
    ) -> None:
        """Load the model.

        Args:
            config: The model that generates: its settings, or its path alone.
            reference: A second model, with memory of its own, that gives every finished sample
                its `ref_logprobs`; the same as `config` for a frozen copy. Default:
                `config.reference_model_path`.

        Raises:
            ModelError: The model is missing or can't be served.
            ConfigError: `kv_events` is set: they are published on a bus.
        """
        self._lock = RLock()
        self.config = own = EngineConfig.of(config)
        if own.kv_events:
            raise ConfigError("engine.kv_events needs a bus: leave it out here, or run a Pipeline")
        # The reference is an engine here, and no part of the cores as in a pipeline.
        self._reference: EngineReference | None = None
        shares_updates = reference is None and own.keeps_unquantized
        if reference is not None or own.reference_model_path:
            from .engine_reference import EngineReference, reference_settings

            self._reference = EngineReference(InferenceEngine(reference or reference_settings(own)))
            own = replace(own, reference_model_path="")
        folder = self.config.model_folder
        read_ahead(self.config)
        import torch

        from ..stages.executor.core import ExecutorCore

        if own.cpu_threads:
            torch.set_num_threads(own.cpu_threads)
        with ThreadPoolExecutor(1) as beside:
            # While weights are copied, which needs no interpreter lock.
            found = beside.submit(find_tokenizer, folder)
            self._core: ExecutorCore | None = ExecutorCore(self.config, now_ns=now_ns)
            tokenizer = found.result()
        if self._reference is not None and shares_updates:
            self._reference.share_updates(self._core)
        self.config = replace(self.config, max_batch_size=self._core.max_batch_size)
        capacity = self._executor.capacity()
        # Results stay in this process, so limits on what one client may have don't apply.
        settings = Config(
            engine=own,
            admission=AdmissionConfig(max_samples=_MOST_SAMPLES),
            bus=BusConfig(max_result_bytes=1 << 62),
        )
        self._admission = AdmissionCore(
            settings,
            tokenizer,
            stop_token_ids_of(folder, tokenizer),
            find_image_processor(folder, tokenizer),
        )
        self._admission.set_capacity(capacity)
        # Results come back at once, so no plan is made ahead of them.
        self._batching = BatchingCore(self.config, capacity, steps_ahead=1)
        self._tiers: EngineTiers | None = None
        if TierCapacity.find(capacity.parts) is not None:
            self._tiers = EngineTiers.of(self._core, self._batching)
        streamed = tokenizer if self._executor.model.generates else None
        self._streaming = StreamingCore(streamed, config=settings)
        self._requests, self._images = UnfinishedRequests(), EngineImages()
        # Samples from the response cache, and those that finished while `generate` waited for
        # others; the next `step` returns them.
        self._uncollected: list[Finished] = []
        for id, path in self.config.adapters.items():
            self.load_adapter(id, path)

    def __enter__(self) -> InferenceEngine:
        return self

    def __repr__(self) -> str:
        core: ExecutorCore | None = getattr(self, "_core", None)
        if core is None:
            return f"InferenceEngine({self.config.model_path!r}, shut down)"
        state = f"weight_version={self._weights.version}, unfinished={len(self._requests)}"
        return f"InferenceEngine({self.config.model_path!r}, {state})"

    def __exit__(self, *error: object) -> None:
        if not is_forked():  # all is the parent's
            self.shutdown()

    # --- all at once --------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt | ChatPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        num_samples_per_prompt: int = 1,
        *,
        show_progress: bool = False,
        adapter: str = "",
        predictions: Sequence[Prompt | None] | None = None,
        kv_sessions: Sequence[KVSession | None] | None = None,
        images: Sequence[Any] | None = None,
    ) -> list[TrainingSample]:
        """Complete prompts.

        Args:
            prompts: Texts, token ids, or conversations that a ChatRenderer has rendered.
            sampling_params: One for all prompts, or one for each; the defaults when None.
            num_samples_per_prompt: Samples of each prompt, which is computed once.
            show_progress: Whether to draw tqdm's progress bar, on standard error.
            adapter: The id of a loaded adapter; "" for the model alone.
            predictions: For each prompt the expected completion, as text or token ids, or None.
                Speculation uses it as a draft; it has no effect on any token.
            kv_sessions: For each prompt the conversation of which it is a turn, or None.
            images: For each prompt its images, a list or a single one, or None: PIL images, paths
                or the content of files. The prompt has the model's placeholder where each belongs.

        Returns:
            In the order of the prompts, then of the samples.

        Raises:
            RequestError: A prompt or parameter is refused, or parameters or predictions don't match
                the number of prompts; nothing was generated.
            WeightsError: Memory is released, or weights could not be put in place.
        """
        prompts = check_prompts(prompts)
        more = (adapter, predictions, kv_sessions)
        requests = make_requests(prompts, sampling_params, num_samples_per_prompt, *more)
        with self._images.given_to(requests, images) as requests:
            title = "Generating" if show_progress else ""
            return self._with_reference(self._run_all(requests, title, prompts))

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
        """Return the vectors of prompts, pooled from the last hidden states of their tokens.

        Args:
            prompts: Texts, or token ids.
            pooling, normalize, dimensions: As in EmbedParams.
            show_progress: Whether to draw tqdm's progress bar, on standard error.
            adapter: As in `generate`.

        Returns:
            `[prompts, dimensions]` float32 on the CPU.

        Raises:
            RequestError: A prompt or parameter is refused; nothing was computed.
            WeightsError: Memory is released.
        """
        import torch

        params = EmbedParams(pooling=pooling, normalize=normalize, dimensions=dimensions)
        requests = [
            make_request(prompt, embed=params, adapter=adapter) for prompt in check_prompts(prompts)
        ]
        if not requests:
            return torch.empty(0, 0)
        finished = self._run_all(requests, "Embedding" if show_progress else "")
        return torch.tensor([sample.embedding for sample, _ in finished], dtype=torch.float32)

    def score(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        by_reference: bool = False,
        show_progress: bool = False,
        adapter: str = "",
    ) -> list[tuple[float, ...]]:
        """Return the logprobs of given completions under the current weights.

        Args:
            prompts: Token ids.
            completions: Token ids, at least one for each prompt.
            sampling_params: One for all, or one for each: those of the samples, since the logprobs
                are at their temperature (1 when None); penalties and logit_bias are ignored.
            by_reference: By the reference model instead, such as the weights before they became
                codes.
            show_progress, adapter: As in `generate`; the reference model has no adapters.

        Returns:
            `[completion]`, float32, for each completion.

        Raises:
            RequestError: A prompt or completion is refused, the numbers of prompts and completions
                differ, a completion is empty, or prompt and completion are longer than
                max_model_len - 1 together; or there is no reference model. Nothing was computed.
        """
        prompts, completions = token_ids_to_score(prompts, completions)
        if by_reference:
            if adapter:
                raise ArgumentError(
                    "the reference model has no adapters; leave adapter or by_reference out"
                )
            if self._reference is None:
                raise ArgumentError("there is no reference model; set engine.reference_model_path")
            return self._reference.score(
                prompts, completions, sampling_params, show_progress=show_progress
            )
        only_score = params_to_score(sampling_params, prompts)
        pairs = zip(prompts, completions, strict=True)
        whole = [[*prompt, *completion] for prompt, completion in pairs]
        scored = self._scored(whole, only_score, show_progress, adapter)
        return [
            cast(tuple[float, ...], (sample.prompt_logprobs or ())[-len(completion) :])
            for sample, completion in zip(scored, completions, strict=True)
        ]

    def replay(self, recorded: TrainingSample | Completion, *, at: int | None = None) -> Replay:
        """Compute a sample, or a request of a pipeline, again at the present weights, and compare.

        Args:
            recorded: The sample; or a terminal message, as `submit --json` prints it.
            at: The version that the present weights have in the record; None for their own number.

        Returns:
            Whether tokens and logprobs are equal to the bit; if not, where they part, and why as
            far as it can be known (docs/replay.md).

        Raises:
            RequestError: `not_replayable`: the record lacks what is needed. Or the request is
                refused here.
        """
        from .replay import replay_here

        def complete(request: GenerateRequest) -> Completion:
            finished = self._run_all([request])
            return completion_of(*(sample for sample, _ in finished))

        if not isinstance(recorded, Completion | TrainingSample):
            raise ArgumentError(
                f"replay takes a TrainingSample or a Completion, not {shown(recorded)}",
                remedy="pass one that an engine returned",
            )
        if not isinstance(recorded, Completion):
            recorded = completion_of(recorded)
        return replay_here(complete, recorded, at)

    def default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that the model recommends; never applied by default.

        Raises:
            ModelError: The model's generation_config.json can't be read or used.
        """
        return default_sampling_params(self.config.model_folder)

    # --- step by step -------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt | ChatPrompt,
        sampling_params: SamplingParams | None = None,
        num_samples: int = 1,
        *,
        request_id: RequestId | None = None,
        adapter: str = "",
        prediction: Prompt | None = None,
        kv_session: KVSession | None = None,
        images: Sequence[Any] = (),
        max_version_lag: int | None = None,
        on_version_lag: Literal["flag", "cut", "retract"] = "flag",
    ) -> RequestId:
        """Queue one request and return its id, which its samples carry.

        Args:
            prompt: As in `generate`.
            sampling_params: The defaults when None.
            num_samples: Samples of the prompt, which is computed once.
            request_id: Text or an integer, of no unfinished request; generated when None.
            adapter, prediction, kv_session, images: As in `generate`, of the one prompt.
            max_version_lag, on_version_lag: As in GenerateRequest.

        Raises:
            RequestError: The request is refused; `code` and message give the reason.
        """
        if request_id is not None:
            self._requests.check_id(request_id)
        name = self._requests.new_name()
        request_id = name if request_id is None else request_id
        more = (adapter, prediction, kv_session, max_version_lag, on_version_lag)
        request = make_request(prompt, sampling_params, num_samples, None, *more)
        with self._images.given_to([request], [images]) as (request,):
            self._uncollected += self._queue(name, request_id, request, chat_of(prompt))
        return request_id

    def step(self) -> list[TrainingSample]:
        """Run one scheduling and one forward pass; return the samples of finished requests.

        Raises:
            WeightsError: Memory is released, or weights could not be put in place.
        """
        new = [pair for _, pairs in self._advance() for pair in pairs]
        earlier, self._uncollected = self._uncollected, []
        return self._with_reference(earlier + new)

    def has_pending(self) -> bool:
        """Return whether a request is unfinished, or samples are still to be collected."""
        return bool(self._requests or self._uncollected)

    def abort(self, request_id: RequestId) -> list[TrainingSample]:
        """End a request early.

        Returns:
            Its samples so far; incomplete ones have the finish_reason "abort". Empty if none had
            begun, and for an unknown id.
        """
        name = self._requests.name_of(request_id)
        return [] if name is None else self._abort(name)

    # --- cache and shutdown -------------------------------------------------------------------

    def flush_cache(self) -> None:
        """Drop all cached prefixes and responses; running sequences are not affected."""
        self._batching.cache.flush()
        self._admission.flush()

    def kv_session(
        self, session: str, action: SessionAction, *, ttl_s: float | None = None
    ) -> KVSessionResult:
        """Pin, release, demote or prefetch the KV of a conversation between two turns.

        It returns when the blocks have been moved. Meanwhile unfinished requests run.

        Args:
            session, action, ttl_s: As in `BusClient.kv_session`.

        Raises:
            RequestError: `invalid_kv_session`: `action` is unknown.
        """
        call = ControlSession(GenerateRequest().tenant, session, check_action(action), ttl_s)
        result: KVSessionResult = self._batching.receive(call, now_ns())
        tiers = self._tiers
        while tiers is not None and (tiers.planned.fetches or tiers.planned.has_moves):
            self._uncollected += [pair for _, pairs in self._advance() for pair in pairs]
        if result.outcome == "deferred" and action == "prefetch":
            call = ControlSession(call.tenant, session, call.action)
            result = self._batching.receive(call, now_ns())
        return result

    def shutdown(self) -> None:
        """Free the memory of model and cache. A second call does nothing.

        Afterwards, calls that need the model raise RuntimeError.
        """
        self._admission.close()
        if self._core is not None:
            try:
                # Not with weights that wait to be put in place: that may fail.
                tiers, weights = self._tiers, self._weights
                while tiers is not None and tiers.planned.saves and not weights.pending_version:
                    self._advance()
            finally:
                self._core.close()
                self._core = self._tiers = None
        if self._reference is not None:
            self._reference.shutdown()

    # --- internals ----------------------------------------------------------------------------

    @property
    def _executor(self) -> ExecutorCore:
        if self._core is None:
            raise RuntimeError("this engine was shut down; make another one")
        return self._core

    def _queue(
        self,
        name: str,
        id: RequestId | None,
        request: GenerateRequest,
        chat: ChatPrompt | None = None,
    ) -> list[Finished]:
        """Queue a request, or return its samples from the response cache."""
        now = now_ns()
        request = replace(request, request_id=name)
        entry, tokens = RequestEntry(name, request), None
        if request.images:
            self._admission.check(entry, now, now)
            images = self._images.load(self._admission, request)
            tokens = self._admission.tokenize(request, images)
        try:
            accepted = self._admission.admit(entry, now, now, tokens=tokens)
        except RequestError as error:
            if error.code != "unknown_model":
                raise
            raise ArgumentError(
                f"no adapter {shown(request.model)} is loaded; call load_adapter", code=error.code
            ) from None
        self._images.add(name, tokens)
        self._requests.add(name, Unfinished(accepted, request.sampling, id, chat))
        deliveries = self._streaming.open(self._admission.look_up(accepted), now)
        for ended in (ended for each in deliveries for ended in each.ended):
            return self._finished(ended)[1]
        self._batching.add(accepted.admitted)
        return []

    def _scored(
        self, prompts: Any, params: Sequence[SamplingParams], show_progress: bool, adapter: str = ""
    ) -> list[TrainingSample]:
        requests = make_requests(prompts, params, 1, adapter, None, None)
        return [each for each, _ in self._run_all(requests, "Scoring" if show_progress else "")]

    def _run_all(
        self, requests: Sequence[GenerateRequest], title: str = "", prompts: Iterable[Any] = ()
    ) -> list[Finished]:
        """Queue the requests and step until all have ended; return their samples in order.

        Args:
            requests: The requests.
            title: That of a progress bar; "" for none.
            prompts: Those of the requests, as the caller gave them.
        """
        names: dict[str, None] = {}
        finished: dict[str, list[Finished]] = {}
        try:
            for request, prompt in zip_longest(requests, prompts):
                name = self._requests.new_name()
                names[name] = None
                if served := self._queue(name, None, request, chat_of(prompt)):
                    finished[name] = served
            with progress_bar(title, len(names)) as bar:
                if bar is not None:
                    bar.update(len(finished))
                while len(finished) < len(names):
                    for name, samples in self._advance():
                        if name in names:
                            finished[name] = samples
                            if bar is not None:
                                bar.update()
                        else:
                            self._uncollected += samples
            tiers = self._tiers
            while tiers is not None and tiers.planned.audits:
                self._advance()
        except BaseException:
            for name in names:
                self._abort(name)
            raise
        return [pair for name in names for pair in finished[name]]

    def _abort(self, name: str) -> list[TrainingSample]:
        if name not in self._requests:
            return []
        cancel = Cancel(name, name, "cancelled", "cancelled", "aborted")
        self._batching.cancel(cancel)
        (ended,) = self._streaming.end(cancel, now_ns()).ended
        return self._with_reference(self._finished(ended)[1])

    def _advance(self) -> list[tuple[str, list[Finished]]]:
        executor = self._executor
        plan = next_plan(self._batching, self._tiers)
        if plan is None:
            if self._requests:
                if self._batching.lacks:
                    raise self._memory.lacking(self._batching.lacks)
                raise RuntimeError("requests are unfinished and nothing can run; please report it")
            return []
        try:
            self._images.give(executor, plan)
            result = executor.execute(plan)
        except ModelError:
            # The weights are broken, and so may be all KV that they computed.
            executor.clear()
            self._batching.forget_plans()
            self._batching.cache.flush()
            self._report_memory()
            raise
        except BaseException:
            # Perhaps an interrupt: the requests are queued again for the next step.
            executor.reset()
            self._batching.forget_plans()
            if version := self._weights.pending_version:
                self._batching.receive(WeightsReady(version, "keep"), now_ns())
            self._report_memory()
            raise
        self._batching.absorb(result.summary())
        self._batching.take_report()  # for fairness, which is absent here
        deliveries = self._streaming.absorb(result, now_ns())
        self._batching.stop(deliveries.halts)
        self._begin_anew(deliveries)
        # An aborted request ends a second time when the executor returns its cancellation.
        finished = [
            self._finished(ended)
            for ended in deliveries.ended
            if ended.completion.request_id in self._requests
        ]
        if refused := self._weights.take_refused():
            self._uncollected += [pair for _, pairs in finished for pair in pairs]
            self._admission.set_weights(self._weights.version)
            raise refused
        return finished

    def _finished(self, ended: EndedRequest) -> tuple[str, list[Finished]]:
        completion = ended.completion
        name = completion.request_id
        request = self._requests.finish(name)
        self._images.remove(name)
        self._admission.keep(request.accepted, ended.response)
        form = self._executor.model.forms
        more = form, self.config.model_path
        samples = [make_sample(request, completion, each, *more) for each in completion.samples]
        return name, [(sample, request.params) for sample in samples]

    def _with_reference(self, finished: list[Finished]) -> list[TrainingSample]:
        """Return the samples, with the logprobs of the reference model if there is one."""
        if self._reference is None:
            return [sample for sample, _ in finished]
        return self._reference.with_scores(finished)


if TYPE_CHECKING:
    # mypy checks here that the engine fulfils the contract.
    _engine: type[RolloutEngine] = InferenceEngine
