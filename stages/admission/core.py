"""Validation of requests, and their conversion to the lane's messages.

RequestEntry ──check──► GenerateRequest ──tokenize──► Tokens ──admit──► Accepted
                                                                          │
                 AdmittedRequest for fairness, RequestOpened for streaming ◄┘
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

import msgspec

from ...bus.control import ReplicaCapacity
from ...bus.entries import RequestEntry
from ...bus.messages import (
    AdmittedRequest,
    CacheScope,
    Prompt,
    RequestInfo,
    RequestOpened,
    SequenceSpec,
    StoredResponse,
)
from ...bus.public import GenerateRequest
from ...bus.recovery import RecoveredSample
from ...bus.sections import with_sections
from ...config import Config, RequestError
from ..parts import Kind, Parts
from .arrivals import Accepted, PromptImage, ResponseKey, Tokens
from .checks import (
    check_no_text,
    check_owner,
    check_request,
    check_sampling,
    readable,
    request_id_of,
)
from .parts import Part, make_parts
from .prompts import PromptReader
from .sampling import SamplingLimits, seeds_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from ...text.images import ImageProcessor


class AdmissionCore:
    """Checks requests and makes their sequences; the ledger holds those in flight.

    `set_capacity` must come before the first `admit`.
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
            processor: None for a model without images.
        """
        self._model_name = config.engine.model_name
        self._seed = config.engine.seed
        self._limits = config.admission
        self._resolve = SamplingLimits(config, stop_token_ids)
        self._processor = processor
        self._tokenizer = tokenizer
        from ...text.longest_token import longest_token_bytes  # which no request needs

        self._longest_token_bytes = longest_token_bytes(tokenizer)
        self._capacity: ReplicaCapacity | None = None
        self._seq_ids = itertools.count(1)
        self._parts = Parts(Part, make_parts(config, tokenizer, processor))
        # For each optional field of requests, its part.
        by_field = [(field, part) for part in self._parts.all for field in part.fields]
        self._optional_fields = attrgetter(*(field for field, _ in by_field))
        self._parts_of_fields = tuple(part for _, part in by_field)

    def part(self, kind: type[Kind]) -> Kind:
        """Return the part of a class. Raises KeyError if it is not configured."""
        return self._parts.get(kind)

    def close(self) -> None:
        """End the parts' processes."""
        for hook in self._parts.close:
            hook()

    # --- capacity -----------------------------------------------------------------------------

    @property
    def capacity(self) -> ReplicaCapacity:
        """The lane's capacity.

        Raises:
            RuntimeError: It is unknown yet.
        """
        if self._capacity is None:
            raise RuntimeError("set_capacity must come before the first request")
        return self._capacity

    def set_capacity(self, capacity: ReplicaCapacity) -> None:
        """Set the lane's capacity."""
        before, self._capacity = self._capacity, capacity
        for hook in self._parts.set_capacity:
            hook(capacity)
        now = capacity.exact, capacity.weight_version
        if before is None or (before.exact, before.weight_version) != now:
            self.flush()

    def set_weights(self, version: int) -> None:
        """Set the version of the lane's weights alone."""
        if version != self.capacity.weight_version:
            self._capacity = msgspec.structs.replace(self.capacity, weight_version=version)
            self.flush()

    def flush(self) -> None:
        """Drop all that parts keep and that depends on the weights."""
        for hook in self._parts.weights_changed:
            hook(self.capacity)

    # --- checks -------------------------------------------------------------------------------

    def check(
        self, entry: RequestEntry, received_ns: int, now_ns: int, *, owner: str | None = None
    ) -> tuple[GenerateRequest, str]:
        """Check all of a request but its texts; return it and its adapter's id. See `admit`.

        Raises:
            RequestError: Refused.
        """
        return self._check(entry, received_ns, now_ns, owner)[:2]

    def _check(
        self, entry: RequestEntry, received_ns: int, now_ns: int, owner: str | None
    ) -> tuple[GenerateRequest, str, Sequence[Part]]:
        """Check an entry like `check`; return also the parts of which the request gives a field."""
        check_owner(entry, owner)
        request = readable(entry)
        check_request(request, max_samples=self._limits.max_samples)
        if request.budget_ns is not None and request.budget_ns <= max(0, now_ns - received_ns):
            raise RequestError(
                "the request's time was over before it could run; give it more", code="expired"
            )
        # After the budget: a request without time left ends while no executor has named adapters.
        adapter, capacity = "", self.capacity
        for hook in self._parts.resolve:
            adapter = hook(entry, request) or adapter
        check_sampling(request.sampling, vocab_size=capacity.vocab_size)
        if request.embed is None and "generate" not in capacity.capabilities:
            raise RequestError(
                f"{self._model_name} makes embeddings here and generates nothing; ask for those "
                "(embed), or ask another model",
                code="cannot_generate",
            )
        parts = self._parts_of(request)
        for part in parts:
            part.check(request, capacity)
        if self._tokenizer is None:
            check_no_text(request)
        return request, adapter, parts

    def may_fit(self, entry: RequestEntry) -> bool:
        """Return whether only tokenising shows if the request's texts are too long."""
        try:
            if isinstance(entry.request, GenerateRequest):
                reader = self._reader(entry.request)
                reader.check_prompt()
                for part in self._parts_of(entry.request):
                    part.check_size(reader)
        except RequestError:
            return False
        return True

    def _parts_of(self, request: GenerateRequest) -> Sequence[Part]:
        """Return the parts of which a request gives a field; one may occur twice."""
        given = self._optional_fields(request)
        return [*itertools.compress(self._parts_of_fields, given)] if any(given) else ()

    # --- tokens -------------------------------------------------------------------------------

    def tokenize(self, request: GenerateRequest, media: Sequence[PromptImage] = ()) -> Tokens:
        """Tokenise a request's prompt, and do the parts' slow checks.

        Another thread may call it: it changes no state. `check` comes before.

        Args:
            media: For the placeholders in the prompt.

        Raises:
            RequestError: Refused for its texts.
        """
        return self._tokenize(request, self._parts_of(request), media)

    def _tokenize(
        self, request: GenerateRequest, parts: Sequence[Part], media: Sequence[PromptImage] = ()
    ) -> Tokens:
        for part in parts:
            part.prepare(request)
        reader = self._reader(request)
        reader.check_prompt()
        if not parts:
            return Tokens(Prompt(reader.prompt().token_ids))
        expanded = reader.prompt([each.size for each in media])
        prompt = Prompt(expanded.token_ids, tuple([each.id for each in media]))
        sections = {part: part.read(reader, expanded, media) for part in parts}
        return Tokens(prompt, tuple([each for each in sections.values() if each is not None]))

    def _reader(self, request: GenerateRequest) -> PromptReader:
        capacity = self.capacity
        return PromptReader(
            request,
            self._tokenizer,
            self._longest_token_bytes,
            capacity.max_model_len,
            capacity.vocab_size,
            self._processor,
        )

    # --- messages -----------------------------------------------------------------------------

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
            tokens: Result of `tokenize`; None to tokenise a request without media here.
            trace: Traceparent and tracestate for the later stages.

        Raises:
            RequestError: Refused. `status_of` its code is the status of the terminal message.
        """
        request, adapter, given = self._check(entry, received_ns, now_ns, owner)
        request_id = request_id_of(entry)
        prompt, parts = tokens or self._tokenize(request, given)
        num_tokens = len(prompt.token_ids)
        if request.embed is None:
            sampling, pooling = self._resolve(request, num_tokens, self.capacity), None
        else:
            for hook in self._parts.pool:
                sampling, pooling = hook(request, num_tokens, self.capacity)
        n, tenant, seeds = request.n, request.tenant, seeds_of(request, request_id, self._seed)
        about = entry, request, adapter, prompt, sampling, pooling, seeds
        (traceparent, tracestate), stop = trace, sampling.stop
        opened = RequestOpened(
            request_id=request_id,
            entry_id=entry.entry_id,
            model=adapter or self._model_name,
            n=n,
            stream=request.stream and pooling is None,
            stop=stop,
            prompt_token_ids=prompt.token_ids,
            traceparent=traceparent,
            tracestate=tracestate,
            received_ns=received_ns,
            min_tokens=sampling.min_tokens,
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            priority=request.priority,
            embeds=pooling is not None,
            tenant=tenant,
            parts=tuple([new for hook in self._parts.opened if (new := hook(*about)) is not None]),
            prompt_logprob_start=sampling.prompt_logprob_start,
            num_targets=sampling.num_targets,
            is_chat=request.is_chat or request.messages is not None,
        )
        admitted = AdmittedRequest(
            info=RequestInfo(request_id, entry.entry_id, traceparent, tracestate, adapter, pooling),
            prompt=prompt,
            sampling=msgspec.structs.replace(sampling, stop=()) if stop else sampling,
            sequences=tuple(map(SequenceSpec, itertools.islice(self._seq_ids, n), range(n), seeds)),
            tenant=tenant,
            priority=request.priority,
            cache_scope=CacheScope(self.sharing_tenant(request), request.cache_salt, adapter),
            has_stop_strings=stop != (),
            parts=parts,
        )
        key: ResponseKey | None = None
        for hook in self._parts.key:
            key = hook(request, opened, admitted)
        return Accepted(opened, admitted, key)

    def sharing_tenant(self, request: GenerateRequest) -> str:
        """Return the tenant that shares a request's cached prefixes and images; "" for all."""
        return "" if self._limits.share_prefixes_across_tenants else request.tenant

    def look_up(self, accepted: Accepted) -> RequestOpened:
        """Return the message that opens a new request."""
        opened = accepted.opened
        for hook in self._parts.look_up:
            if (section := hook(accepted)) is not None:
                opened = with_sections(opened, section)
        return opened

    def keep(self, accepted: Accepted | None, response: StoredResponse | None) -> None:
        """Give parts the response of a request that has ended, if there is one."""
        if accepted is not None and response is not None:
            for hook in self._parts.finished:
                hook(accepted, response)

    def resumed(
        self, request: AdmittedRequest, samples: Sequence[RecoveredSample]
    ) -> AdmittedRequest:
        """Return a request after a failure: its unfinished samples continue after their tokens."""
        tokens = {sample.sample_index: sample.token_ids for sample in samples}
        finished = {sample.sample_index for sample in samples if sample.finished}
        sequences = tuple(
            SequenceSpec(next(self._seq_ids), index, spec.seed, tokens.get(index, ()))
            for spec in request.sequences
            if (index := spec.sample_index) not in finished
        )
        return msgspec.structs.replace(request, sequences=sequences)


def status_of(code: str) -> Literal["error", "expired"]:
    """Return the status of a request that was refused with a code."""
    return "expired" if code == "expired" else "error"
