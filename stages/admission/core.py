"""Validation of requests, and their conversion to the lane's messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec
import xxhash

from ...bus.control import ReplicaCapacity
from ...bus.entries import (
    MAX_REQUEST_ID_LENGTH,
    Malformed,
    RequestEntry,
    is_usable_request_id,
)
from ...bus.messages import (
    AdmittedRequest,
    CacheScope,
    Prompt,
    RequestInfo,
    RequestOpened,
    SequenceSpec,
    StoredResponse,
)
from ...bus.parts.accounts import RequestTimes
from ...bus.parts.images import PromptMedia
from ...bus.parts.responses import ResponseCaching
from ...bus.parts.scoring import ReferenceScoring
from ...bus.parts.sessions import SessionTurn
from ...bus.parts.speculation import Prediction
from ...bus.pooling import Pooling
from ...bus.public import Fingerprint, GenerateRequest
from ...bus.recipes import RecipeParts
from ...bus.recovery import RecoveredSample
from ...bus.sections import Sections, with_sections
from ...config import Config, RequestError, SamplingParams, prompt_too_long, shown
from ...store.board import LoadedAdapter
from ...text.grammar import GrammarCompiler, check_size, plain
from ...text.images import ImageProcessor, Size
from ...text.tokenizer import ANY_LENGTH, longest_token_bytes
from .arrivals import Accepted, Tokens
from .checks import (
    EMBED_SAMPLING,
    check_embed,
    check_min_tokens,
    check_no_text,
    check_request,
    check_result_size,
    check_sample_seeds,
    check_sampling,
    pooling_of,
    request_id_of,
)
from .images import PromptImage, RequestImages, media_of
from .prompts import PromptReader
from .responses import ResponseCache, ResponseKey, is_repeatable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


MOST_FORMER = 1024
"""Ids of unloaded adapters that are remembered."""


class AdmissionCore:
    """Checks requests and makes their sequences; the ledger holds those in flight.

    `set_capacity` must come before the first `admit`.

    Attributes:
        images: Checks images, and has the processes that decode them.
        responses: The response cache.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerFast | None,
        stop_token_ids: frozenset[int],
        processor: ImageProcessor | None = None,
    ) -> None:
        """Create a core without capacity.

        Args:
            config: All settings.
            tokenizer: None for a model without one: then all texts are refused.
            stop_token_ids: The model's own, for requests that don't ignore them.
            processor: None for a model without images: then all images are refused.
        """
        self._model_name = config.engine.model_name
        self._names = {"", self._model_name, *config.engine.model_aliases}
        self._engine = config.engine
        self._limits = config.admission
        self._max_result_bytes = config.bus.max_result_bytes
        self._has_reference = bool(config.engine.reference_model_path)
        self.images = RequestImages(config.images, processor, self._has_reference)
        self._tokenizer = tokenizer
        self._longest_token_bytes = (
            ANY_LENGTH if tokenizer is None else longest_token_bytes(tokenizer)
        )
        self._stop_token_ids = stop_token_ids
        self._capacity: ReplicaCapacity | None = None
        # Of recipes; None without recipes.
        self._executors: tuple[Fingerprint, ...] | None = None
        self._adapters: dict[str, LoadedAdapter] = {}
        # Version by id of adapters that are being unloaded.
        self._closed: dict[str, int] = {}
        # Ids of adapters that were loaded, the last ones.
        self._former: dict[str, None] = {}
        self._grammars: GrammarCompiler | None = None
        self._seq_ids = itertools.count(1)
        self.responses = ResponseCache(config.engine.response_cache_bytes)

    @property
    def takes_images(self) -> bool:
        """Whether the model takes images, as far as its folder says."""
        return self.images.processor is not None

    def close(self) -> None:
        """End the processes that decode images."""
        self.images.close()

    def set_capacity(self, capacity: ReplicaCapacity) -> None:
        """Set the lane's capacity and adapters. Other weights empty the response cache."""
        before, self._capacity = self._capacity, capacity
        self._executors = capacity.fingerprints if self._limits.recipes else None
        now = capacity.exact, capacity.weight_version
        if before is None or (before.exact, before.weight_version) != now:
            self.responses.clear()
        self.set_adapters(capacity.adapters)
        tokenizer, known = self._tokenizer, self._grammars
        if tokenizer is not None and (known is None or known.vocab_size != capacity.vocab_size):
            self._grammars = GrammarCompiler.of(
                self._engine, capacity.vocab_size, lambda folder: tokenizer
            )

    def set_weights(self, version: int) -> None:
        """Set the version of the lane's weights alone, as `set_capacity`."""
        if version != self.capacity.weight_version:
            self._capacity = msgspec.structs.replace(self.capacity, weight_version=version)
            self.responses.clear()

    def set_adapters(self, adapters: Iterable[LoadedAdapter]) -> None:
        """Set the adapters that requests may name; of a closed one only a newer version."""
        loaded = {adapter.id: adapter for adapter in adapters}
        self._former |= dict.fromkeys(loaded)
        while len(self._former) > MOST_FORMER:
            del self._former[next(iter(self._former))]
        self._closed = {
            id: version
            for id, version in self._closed.items()
            if id in loaded and loaded[id].version <= version
        }
        self._adapters = {id: each for id, each in loaded.items() if id not in self._closed}

    def close_adapter(self, id: str) -> bool:
        """Refuse an adapter until it is loaded again; return whether it was loaded."""
        adapter = self._adapters.pop(id, None)
        if adapter is not None:
            self._closed[id] = adapter.version
        return adapter is not None or id in self._closed

    @property
    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """Adapters that requests may name."""
        return tuple(self._adapters.values())

    @staticmethod
    def check_owner(entry: RequestEntry, owner: str | None) -> None:
        """Check that an entry may use its request id; `owner` as in `admit`.

        This check comes first: any other refusal is written to the result stream of that id, which
        would be another request's.

        Raises:
            RequestError: duplicate_request.
        """
        if owner not in (None, entry.entry_id):
            raise RequestError(
                f"a request {request_id_of(entry)!r} is in flight or has its output still stored; "
                f"choose another request_id, or leave it empty",
                code="duplicate_request",
            )

    def check(
        self, entry: RequestEntry, received_ns: int, now_ns: int, *, owner: str | None = None
    ) -> tuple[GenerateRequest, str]:
        """Check all of a request but its texts; return it and its adapter's id. See `admit`.

        Raises:
            RequestError: Refused.
        """
        self.check_owner(entry, owner)
        request = self._readable(entry)
        check_request(request, max_samples=self._limits.max_samples)
        if request.budget_ns is not None and request.budget_ns <= max(0, now_ns - received_ns):
            raise RequestError(
                "the request's time was over before it could run; give it more", code="expired"
            )
        # Behind the budget: one that is over ends while no executor has named its adapters.
        adapter = self.resolve(self.asked(entry, request))
        capacity = self.capacity
        check_sampling(request.sampling, vocab_size=capacity.vocab_size)
        check_embed(request, capacity, self._model_name)
        if request.images or request.messages:
            self.images.check(request, capacity.images, self._model_name)
        if self._tokenizer is None:
            check_no_text(request)
        if request.sampling.constraint is not None:
            check_size(request.sampling.constraint, self._limits.max_constraint_bytes)
        return request, adapter

    def may_fit(self, entry: RequestEntry) -> bool:
        """Return whether only tokenising shows if the prompt or the prediction is too long."""
        try:
            if isinstance(entry.request, GenerateRequest):
                reader = self._reader(entry.request)
                reader.check_prompt()
                reader.check_prediction()
        except RequestError:
            return False
        return True

    def knows_constraint(self, request: GenerateRequest | Malformed) -> bool:
        """Return whether `check_constraint` is quick: none, or one that was checked before."""
        if isinstance(request, Malformed) or request.sampling.constraint is None:
            return True
        return self._grammars is not None and self._grammars.knows(request.sampling.constraint)

    def check_constraint(self, request: GenerateRequest) -> None:
        """Compile and check a request's constraint. As `tokenize`, which includes it.

        Raises:
            RequestError: invalid_constraint.
        """
        assert request.sampling.constraint is not None, "only a request with one"
        assert self._grammars is not None, "set_capacity and check come before"
        self._grammars.check(request.sampling.constraint)

    def tokenize(self, request: GenerateRequest, images: Sequence[PromptImage] = ()) -> Tokens:
        """Check a request's constraint, and tokenise its prompt and prediction.

        Slow for a long text or a new constraint. Another thread may call it: it changes no state.
        `check` and `check_image_tokens` come before for a request with images.

        Args:
            images: The request's.

        Raises:
            RequestError: Refused for its prompt, its prediction, or its constraint.
        """
        if request.sampling.constraint is not None:
            self.check_constraint(request)
        reader = self._reader(request)
        reader.check_prompt()
        if request.images:
            assert len(images) == len(request.images), "they are loaded before"
            expanded = reader.prompt([image.size for image in images])
            prompt = Prompt(expanded.token_ids, tuple(image.id for image in images))
            tokens = Tokens(prompt, media=media_of(images, expanded, request.cache_salt))
        else:
            tokens = Tokens(Prompt(reader.prompt().token_ids))
        if not request.prediction:
            return tokens
        reader.check_prediction()
        return tokens._replace(prediction=reader.prediction())

    def check_image_tokens(self, sizes: Sequence[Size]) -> int:
        """Check that a request's images are within all limits; return their tokens.

        Slow for sizes that the processor must try. Another thread may call it.

        Raises:
            RequestError: image_too_large, invalid_image, prompt_too_long.
        """
        capacity = self.capacity
        assert capacity.images is not None, "check comes before"
        number = self.images.check_tokens(sizes, capacity.images.max_tokens)
        if number >= capacity.max_model_len:
            raise prompt_too_long(
                capacity.max_model_len,
                f"the prompt's images take {number}",
                "send fewer or smaller ones",
            )
        return number

    def admit(
        self,
        entry: RequestEntry,
        received_ns: int,
        now_ns: int,
        *,
        owner: str | None = None,
        tokens: Tokens | None = None,
        trace: tuple[str, str] = ("", ""),
    ) -> Accepted:
        """Check a request and make its messages.

        `max_tokens` is cut to the model's length; such a request ends with "length".

        Args:
            entry: The entry.
            received_ns: When the entry was taken; its budget counts from there.
            now_ns: The time.
            owner: The entry that has `request_id_of(entry)`, in flight or by its result stream:
                its own after a failure; None if the id is free.
            tokens: Result of `tokenize`; None to tokenise a request without images here.
            trace: Traceparent and tracestate for the later stages.

        Raises:
            RequestError: Refused. `status_of` its code is the status of the terminal message.
        """
        request, adapter = self.check(entry, received_ns, now_ns, owner=owner)
        request_id = request_id_of(entry)
        tokens = tokens or self.tokenize(request)
        prompt = tokens.prompt
        token_ids = prompt.token_ids
        sampling, pooling = self._asked_for(request, len(token_ids))
        has_reference = self._has_reference and pooling is None
        n, tenant, seeds = request.n, request.tenant, self._seeds(request, request_id)
        opened_parts: Sections = ()
        if entry.queued_ns or entry.waited_ns:
            opened_parts = (RequestTimes(entry.queued_ns, entry.waited_ns),)
        if has_reference:
            opened_parts += (ReferenceScoring(sampling.temperature),)
        if (executors := self._executors) is not None:
            recipe = RecipeParts(tenant, adapter, sampling, seeds, prompt.media, pooling, executors)
            opened_parts += (recipe,)
        parts: Sections = ()
        if tokens.prediction and (draft := self._as_draft(tokens.prediction, sampling)):
            parts += (Prediction(draft),)
        if request.kv_session is not None:
            parts += (SessionTurn(request.kv_session),)
        if tokens.media:
            parts += (PromptMedia(tokens.media),)
        opened = RequestOpened(
            request_id=request_id,
            entry_id=entry.entry_id,
            model=adapter or self._model_name,
            n=n,
            stream=request.stream and pooling is None,
            stop=sampling.stop,
            prompt_token_ids=token_ids,
            traceparent=trace[0],
            tracestate=trace[1],
            received_ns=received_ns,
            min_tokens=sampling.min_tokens,
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            priority=request.priority,
            embeds=pooling is not None,
            tenant=tenant,
            parts=opened_parts,
        )
        admitted = AdmittedRequest(
            info=RequestInfo(request_id, entry.entry_id, *trace, adapter, pooling),
            prompt=prompt,
            sampling=msgspec.structs.replace(sampling, stop=()) if sampling.stop else sampling,
            sequences=tuple(map(SequenceSpec, itertools.islice(self._seq_ids, n), range(n), seeds)),
            tenant=tenant,
            priority=request.priority,
            cache_scope=CacheScope(self.sharing_tenant(request), request.cache_salt, adapter),
            has_stop_strings=bool(sampling.stop),
            parts=parts,
        )
        key = self._response_key(request, opened, admitted) if self.responses.max_bytes else None
        return Accepted(opened, admitted, key)

    def sharing_tenant(self, request: GenerateRequest) -> str:
        """Return the tenant that shares a request's cached prefixes and images; "" for all."""
        return "" if self._limits.share_prefixes_across_tenants else request.tenant

    def look_up(self, accepted: Accepted) -> RequestOpened:
        """Return the message that opens a new request, with its response if that is cached."""
        if accepted.key is None:
            return accepted.opened
        response = self.responses.find(accepted.key)
        keeps = self.responses.generation if response is None else 0
        return with_sections(accepted.opened, ResponseCaching(keeps, response))

    def keep(self, accepted: Accepted | None, response: StoredResponse | None) -> None:
        """Add the response of a request that has ended to the response cache, if possible."""
        if accepted is not None and accepted.key is not None and response is not None:
            self.responses.add(accepted.key, response)

    def no_responses(self) -> str:
        """Return why the response cache is not used; "" if it is, or is off by its setting."""
        if not self.responses.max_bytes:
            return ""
        if self._has_reference:
            return "a reference model scores each response"
        if self.capacity.exact:
            return ""
        return "an executor has no deterministic mode, or replicas have different weights"

    def _response_key(
        self, request: GenerateRequest, opened: RequestOpened, admitted: AdmittedRequest
    ) -> ResponseKey | None:
        """Return a request's key in the response cache; None if it can't be cached."""
        sampling, adapter = admitted.sampling, self._adapters.get(admitted.info.adapter)
        if (
            not self.capacity.exact
            or self._has_reference
            or request.embed is not None
            or request.kv_session is not None  # its KV is to be kept
            or request.sample_seeds  # which the key doesn't have
            or sampling.prompt_logprobs is not None
            or not sampling.response_cache
            or not is_repeatable(sampling)
            # With "auto" deterministic mode doesn't cover adapters.
            or (adapter is not None and self._engine.deterministic is not True)
        ):
            return None
        version = 0 if adapter is None else adapter.version
        return self.responses.key_of(opened, admitted, self.capacity.weight_version, version)

    def resumed(
        self, request: AdmittedRequest, samples: Sequence[RecoveredSample]
    ) -> AdmittedRequest:
        """Return a request after a failure: its unfinished samples go on behind their tokens."""
        tokens = {sample.sample_index: sample.token_ids for sample in samples}
        finished = {sample.sample_index for sample in samples if sample.finished}
        sequences = tuple(
            SequenceSpec(next(self._seq_ids), index, spec.seed, tokens.get(index, ()))
            for spec in request.sequences
            if (index := spec.sample_index) not in finished
        )
        return msgspec.structs.replace(request, sequences=sequences)

    @property
    def capacity(self) -> ReplicaCapacity:
        """The lane's capacity.

        Raises:
            RuntimeError: It is unknown yet.
        """
        if self._capacity is None:
            raise RuntimeError("set_capacity must come before the first request")
        return self._capacity

    def _reader(self, request: GenerateRequest) -> PromptReader:
        capacity = self.capacity
        return PromptReader(
            request,
            self._tokenizer,
            self._longest_token_bytes,
            capacity.max_model_len,
            capacity.vocab_size,
            self.images.processor,
        )

    @staticmethod
    def _readable(entry: RequestEntry) -> GenerateRequest:
        """Return the request, if it is readable and its id is usable."""
        request = entry.request
        if isinstance(request, Malformed):
            raise RequestError(request.message, code=request.code)
        if request.request_id and not is_usable_request_id(request.request_id):
            raise RequestError(
                f"request_id must be 1 to {MAX_REQUEST_ID_LENGTH} printable characters, or empty",
                code="invalid_request_id",
            )
        return request

    def _asked_for(
        self, request: GenerateRequest, num_prompt_tokens: int
    ) -> tuple[SamplingParams, Pooling | None]:
        """Return the sampling parameters, and the pooling of a request for a vector."""
        if request.embed is None:
            return self._resolve(request.sampling, request.n, num_prompt_tokens), None
        most_bytes = self._max_result_bytes
        pooling = pooling_of(request.embed, num_prompt_tokens, self.capacity, most_bytes)
        return EMBED_SAMPLING, pooling

    def _resolve(self, sampling: SamplingParams, n: int, num_prompt_tokens: int) -> SamplingParams:
        """Cut max_tokens to what fits, add the model's stop ids, and normalise a constraint."""
        capacity = self.capacity
        most = capacity.max_model_len - num_prompt_tokens
        if most < 1:
            raise prompt_too_long(
                capacity.max_model_len,
                f"the prompt has {num_prompt_tokens}",
                f"shorten it to {capacity.max_model_len - 1} or fewer",
            )
        max_tokens = min(sampling.max_tokens, most)
        slots = capacity.num_blocks * capacity.block_size
        if num_prompt_tokens + max_tokens > slots:
            fitting = slots - num_prompt_tokens
            advice = f"lower max_tokens to {fitting}" if fitting >= 1 else "shorten the prompt"
            raise RequestError(
                f"prompt and completion may need {num_prompt_tokens + max_tokens} tokens of KV "
                f"cache and the lane has {slots}; {advice}, or give the engine more memory",
                code="exceeds_kv_capacity",
            )
        stop_token_ids = sampling.stop_token_ids
        if not sampling.ignore_eos:
            stop_token_ids |= self._stop_token_ids
        check_min_tokens(sampling.min_tokens, stop_token_ids, vocab_size=capacity.vocab_size)
        constraint = sampling.constraint
        resolved = msgspec.structs.replace(
            sampling,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            constraint=None if constraint is None else plain(constraint),
        )
        check_result_size(
            resolved,
            n,
            num_prompt_tokens,
            self._max_result_bytes,
            reference=self._has_reference,
        )
        return resolved

    def asked(self, entry: RequestEntry, request: GenerateRequest) -> str:
        """Return the model that an entry names.

        The entry's own field wins over the request's, as in the router; but the request may name an
        adapter of that model, also an unloaded one: the model without it must not answer.
        """
        if entry.model and (entry.model != self._model_name or not self._knows(request.model)):
            return entry.model
        return request.model

    def resolve(self, model: str) -> str:
        """Return the id of the adapter that `model` names; "" for the model itself.

        Raises:
            RequestError: unknown_model.
        """
        if model in self._names:
            return ""
        if model in self._adapters:
            return model
        adapters = f", or for an adapter: {', '.join(self._adapters)}" if self._adapters else ""
        raise RequestError(
            f"there is no model {shown(model)} here; leave model empty or ask for "
            f"{self._model_name!r}{adapters}",
            code="unknown_model",
        )

    def _knows(self, model: str) -> bool:
        return model in self._names or model in self._adapters or model in self._former

    def _as_draft(self, prediction: tuple[int, ...], sampling: SamplingParams) -> tuple[int, ...]:
        """Return a prediction as a draft; none where drafts are off."""
        engine = self._engine
        speculates = engine.speculation != "off" and "prediction" in engine.draft_sources
        return prediction if speculates and sampling.max_draft_tokens != 0 else ()

    def _seeds(self, request: GenerateRequest, request_id: str) -> tuple[int, ...]:
        """Return the seed of each sample. Raises RequestError: invalid_sample_seeds."""
        if request.sample_seeds:
            return check_sample_seeds(request)
        seed = request.sampling.seed
        base = f"{self._engine.seed}/{request_id}" if seed is None else str(seed)
        return tuple(map(derive_seed, itertools.repeat(base), range(request.n)))


def status_of(code: str) -> Literal["error", "expired"]:
    """Return the status of a request that was refused with a code."""
    return "expired" if code == "expired" else "error"


def derive_seed(base: str, sample_index: int) -> int:
    """Return a sample's seed, 0 to 2**63 - 1: the same on every machine and in every release."""
    return xxhash.xxh3_64_intdigest(f"{base}/{sample_index}".encode()) >> 1
