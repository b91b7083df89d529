"""What makes an admitted request of what a client wrote, or refuses it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec
import xxhash

from ...bus.channel import Malformed, RequestEntry
from ...bus.control import LaneCapacity
from ...bus.messages import AdmittedRequest, RecoveredSample, RequestInfo, SequenceSpec
from ...bus.public import GenerateRequest, StageTime
from ...config import Config, RequestError, SamplingParams
from ..grammar import GrammarCompiler, check_size, plain
from ..tokenizer import longest_token_bytes
from .checks import (
    MAX_REQUEST_ID_LENGTH,
    check_min_tokens,
    check_request,
    check_result_size,
    check_sampling,
    is_usable_request_id,
)
from .prompts import TextLimit, check_prompt, prompt_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


DEFAULT: str = GenerateRequest().tenant
"""The tenant of requests that name none."""


class AdmissionCore:
    """Checks requests, and makes sequences of them. Which are in flight, the ledger knows.

    `set_capacity` comes before the first `admit`.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerFast,
        stop_token_ids: frozenset[int],
    ) -> None:
        """`stop_token_ids`: the model's own, for requests that don't ignore them."""
        self._model_name = config.engine.model_name
        self._engine_seed = config.engine.seed
        self._limits = config.admission
        self._max_result_bytes = config.bus.max_result_bytes
        self._has_reference = bool(config.engine.reference_model_path)
        self._tokenizer = tokenizer
        self._longest_token_bytes = longest_token_bytes(tokenizer)
        self._stop_token_ids = stop_token_ids
        self._capacity: LaneCapacity | None = None
        self._folder = config.engine.model_folder
        self._grammars: GrammarCompiler | None = None
        self._seq_ids = itertools.count(1)

    def set_capacity(self, capacity: LaneCapacity) -> None:
        """What the lane can hold, from now on."""
        self._capacity = capacity
        if self._grammars is None or self._grammars.vocab_size != capacity.vocab_size:
            self._grammars = GrammarCompiler(
                self._folder, capacity.vocab_size, lambda folder: self._tokenizer
            )

    @staticmethod
    def check_owner(entry: RequestEntry, owner: str | None) -> None:
        """Whether an entry may use its request id; `owner` as in `admit`.

        This must be checked before all else, since any other refusal is written to the result
        stream of that id, which would be somebody else's.

        Raises:
            RequestError: It is another's.
        """
        if owner not in (None, entry.entry_id):
            raise RequestError(
                f"a request {request_id_of(entry)!r} is in flight or has its output still stored; "
                f"choose another request_id, or leave it empty",
                code="duplicate_request",
            )

    def check(
        self, entry: RequestEntry, received_ns: int, now_ns: int, *, owner: str | None = None
    ) -> GenerateRequest:
        """The request of an entry, as far as it can be checked without its prompt. See `admit`.

        Raises:
            RequestError: Refused.
        """
        self.check_owner(entry, owner)
        request = self._readable(entry)
        check_request(request, model_name=self._model_name, max_samples=self._limits.max_samples)
        if request.budget_ns is not None and request.budget_ns <= max(0, now_ns - received_ns):
            raise RequestError(
                "the request's time (budget_ns) was over before it could run; give it more",
                code="expired",
            )
        check_sampling(request.sampling, vocab_size=self.capacity.vocab_size)
        if request.sampling.constraint is not None:
            check_size(request.sampling.constraint, self._limits.max_constraint_bytes)
        return request

    def may_fit(self, entry: RequestEntry) -> bool:
        """Whether a prompt has to be tokenised to see if it is too long."""
        try:
            if isinstance(entry.request, GenerateRequest):
                check_prompt(entry.request, self._text_limit())
        except RequestError:
            return False
        return True

    def tokenize(self, request: GenerateRequest) -> tuple[int, ...]:
        """The prompt of a request as tokens, once its constraint is known to be one.

        It takes long for a long text or a constraint, and may be done by another thread: it changes
        nothing here.

        Raises:
            RequestError: Refused for its prompt, or its constraint.
        """
        constraint, grammars = request.sampling.constraint, self._grammars
        if constraint is not None:
            assert grammars is not None, "set_capacity comes before"
            grammars.check(plain(constraint))
        limit = self._text_limit()
        check_prompt(request, limit)
        vocab_size = self.capacity.vocab_size
        return prompt_token_ids(request, self._tokenizer, limit, vocab_size=vocab_size)

    def admit(
        self,
        entry: RequestEntry,
        received_ns: int,
        now_ns: int,
        *,
        owner: str | None = None,
        token_ids: tuple[int, ...] | None = None,
    ) -> AdmittedRequest:
        """Checks a request and makes its sequences.

        `max_tokens` is cut to what the model's length leaves; such a request ends with "length".

        Args:
            received_ns: When the entry was taken; its budget counts from there.
            owner: The entry that has `request_id_of(entry)`, since it is in flight or its outputs
                stand in that result stream; its own after a failure, None for nobody.
            token_ids: What `tokenize` gave, if it was asked before.

        Raises:
            RequestError: Refused. `status_of` its code is the status of the terminal message.
        """
        request = self.check(entry, received_ns, now_ns, owner=owner)
        request_id = request_id_of(entry)
        if token_ids is None:
            token_ids = self.tokenize(request)
        sampling = self._resolve(request.sampling, request.n, len(token_ids))
        info = RequestInfo(
            request_id=request_id,
            entry_id=entry.entry_id,
            model=self._model_name,
            n=request.n,
            stream=request.stream,
            stop=sampling.stop,
            num_prompt_tokens=len(token_ids),
            traceparent=entry.traceparent,
            tracestate=entry.tracestate,
            received_ns=received_ns,
            min_tokens=sampling.min_tokens,
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            priority=request.priority,
            ref_temperature=sampling.temperature if self._has_reference else None,
        )
        return AdmittedRequest(
            info=info,
            token_ids=token_ids,
            sampling=sampling,
            sequences=self._sequences(request, request_id),
            tenant=request.tenant,
            priority=request.priority,
            cache_salt=self._salt_of(request),
        )

    def resumed(
        self, request: AdmittedRequest, samples: Sequence[RecoveredSample]
    ) -> AdmittedRequest:
        """The same request after a failure: its unfinished samples go on behind their tokens."""
        known = {sample.sample_index: sample for sample in samples}
        sequences = tuple(
            SequenceSpec(
                next(self._seq_ids),
                spec.sample_index,
                spec.seed,
                known[spec.sample_index].token_ids,
            )
            if spec.sample_index in known
            else SequenceSpec(next(self._seq_ids), spec.sample_index, spec.seed)
            for spec in request.sequences
            if not (spec.sample_index in known and known[spec.sample_index].finished)
        )
        return msgspec.structs.replace(request, sequences=sequences)

    @staticmethod
    def leaving(
        request: AdmittedRequest, now_ns: int, traceparent: str, tracestate: str
    ) -> AdmittedRequest:
        """The same request as it leaves: its time here, and the trace of the later stages."""
        received_ns = request.info.received_ns
        held = StageTime(stage="admission", start_ns=received_ns, end_ns=now_ns)
        info = msgspec.structs.replace(
            request.info, traceparent=traceparent, tracestate=tracestate, stages=(held,)
        )
        return msgspec.structs.replace(request, info=info)

    @property
    def capacity(self) -> LaneCapacity:
        """The lane's.

        Raises:
            RuntimeError: It is not known yet.
        """
        if self._capacity is None:
            raise RuntimeError("set_capacity must come before the first request")
        return self._capacity

    def _text_limit(self) -> TextLimit:
        return TextLimit(self._longest_token_bytes, self.capacity.max_model_len)

    @staticmethod
    def _readable(entry: RequestEntry) -> GenerateRequest:
        """The request, if it can be read and its id can be used."""
        request = entry.request
        if isinstance(request, Malformed):
            raise RequestError(request.message, code=request.code)
        if request.request_id and not is_usable_request_id(request.request_id):
            raise RequestError(
                f"request_id must be 1 to {MAX_REQUEST_ID_LENGTH} printable characters, or empty",
                code="invalid_request_id",
            )
        return request

    def _resolve(self, sampling: SamplingParams, n: int, num_prompt_tokens: int) -> SamplingParams:
        """Cuts max_tokens to what fits, adds the model's stop ids, and makes a constraint plain."""
        capacity = self.capacity
        most = capacity.max_model_len - num_prompt_tokens
        if most < 1:
            raise RequestError(
                f"the prompt has {num_prompt_tokens} tokens; prompt and completion together may "
                f"have {capacity.max_model_len}, so shorten it to {capacity.max_model_len - 1} "
                f"or fewer",
                code="prompt_too_long",
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
        most, reference = self._max_result_bytes, self._has_reference
        check_result_size(resolved, n, num_prompt_tokens, most, reference=reference)
        return resolved

    def _salt_of(self, request: GenerateRequest) -> str:
        """Names those who share prefixes with a request: its tenant, and in it who has its salt.

        No other pair of tenant and salt has the same name: tenants are printable, so the first NUL
        ends one. What says nothing of either is "", as it was before there were tenants.
        """
        salt = request.cache_salt
        if self._limits.share_prefixes_across_tenants or (request.tenant, salt) == (DEFAULT, ""):
            return salt
        return f"{request.tenant}\0{salt}"

    def _sequences(self, request: GenerateRequest, request_id: str) -> tuple[SequenceSpec, ...]:
        if request.sampling.seed is not None:
            base = str(request.sampling.seed)
        else:
            base = f"{self._engine_seed}/{request_id}"
        return tuple(
            SequenceSpec(next(self._seq_ids), index, derive_seed(base, index))
            for index in range(request.n)
        )


def request_id_of(entry: RequestEntry) -> str:
    """The id under which an entry runs: its own, or the entry's where it gave no usable one."""
    own = entry.request.request_id
    return own if is_usable_request_id(own) else entry.entry_id


def status_of(code: str) -> Literal["error", "expired"]:
    """The status of the terminal message of a request that was refused with this code."""
    return "expired" if code == "expired" else "error"


def derive_seed(base: str, sample_index: int) -> int:
    """A sample's seed: the same on every machine and in every release, 0 to 2**63 - 1."""
    return xxhash.xxh3_64_intdigest(f"{base}/{sample_index}".encode()) >> 1
