"""The state of one request, and of each of its samples."""

from __future__ import annotations

import sys
from array import array
from dataclasses import InitVar, dataclass, field

from ...bus.control import SampleScored, ScoreSample
from ...bus.messages import RequestOpened, RowFinish, StoredResponse, StoredSample, TopLogprobs
from ...bus.parts.sessions import SessionGrant
from ...bus.pooling import PooledPrompt
from ...bus.public import (
    CompletionChunk,
    CompletionSample,
    FinishReason,
    KVSessionResult,
    StageTime,
    TokenLogprob,
)
from ...bus.steps import PromptLogprobs
from ...text.detokenizer import Detokenizer, Pieces
from .accounts import RequestTime
from .stop_strings import StopStrings

TokenLogprobs = tuple[TokenLogprob, ...]


@dataclass(slots=True, eq=False)
class RequestState:
    """A request in flight.

    Attributes:
        samples: Samples that have started, by index.
        cached_tokens: Prompt tokens that needed no computing, summed over the samples.
        queued: When fairness held the request; None if unknown.
        executed_ns: When its first step began on the device; 0 before.
        step_end_ns: When its last step had its tokens on the host.
        first_step_end_ns: When the first step with a token, or with the prompt's vector, had them
            on the host; 0 before.
        first_token_ns: When that token arrived here; 0 before.
        last_token_ns: When the last token so far arrived.
        prompt_logprobs: Known logprobs of the prompt's tokens, from the first token (None) on.
        prompt_top_logprobs: Top logprobs at the same positions.
        restored: Begun by a predecessor of this stage, so that times are unknown.
        unscored: Finished samples without the reference model's scores, by index.
        prompt_ref_logprobs: The reference model's, of the prompt; None before they are known.
        session: What it may leave in the KV cache as a session's turn; None for other requests.
        time: Its account; None if the time before a restart of this stage is unknown.
        unasked: Begun in an older epoch, and admission has not asked for it in this one.
    """

    info: RequestOpened
    samples: dict[int, Sample] = field(default_factory=dict)
    cached_tokens: int = 0
    queued: StageTime | None = None
    executed_ns: int = 0
    step_end_ns: int = 0
    first_step_end_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    prompt_logprobs: list[float | None] = field(default_factory=lambda: [None])
    prompt_top_logprobs: list[TokenLogprobs] = field(default_factory=lambda: [()])
    restored: bool = False
    unscored: set[int] = field(default_factory=set)
    prompt_ref_logprobs: tuple[float | None, ...] | None = None
    session: SessionGrant | None = None
    time: RequestTime | None = None
    unasked: bool = False

    @property
    def is_done(self) -> bool:
        """Whether all n samples have finished, and have their scores."""
        finished = sum(sample.finish_reason is not None for sample in self.samples.values())
        return finished == self.info.n and not self.unscored

    def session_result(self) -> KVSessionResult | None:
        """Return what becomes of its KV; None if it is no turn of a session."""
        if self.session is None:
            return None
        num_tokens = sum(len(sample.token_ids) for sample in self.samples.values())
        return self.session.result(len(self.info.prompt_token_ids) + num_tokens)

    def absorb_prompt(self, prompt: PromptLogprobs) -> None:
        """Add logprobs of the prompt. After a preemption some come again and are ignored."""
        known = len(self.prompt_logprobs) - prompt.start
        self.prompt_logprobs += prompt.logprobs[known:]
        self.prompt_top_logprobs += map(token_logprobs, prompt.top_logprobs[known:])

    def reported_prompt(
        self,
    ) -> tuple[tuple[float | None, ...] | None, tuple[TokenLogprobs, ...] | None]:
        """Return a Completion's `prompt_logprobs` and `prompt_top_logprobs`."""
        top = self.info.prompt_logprobs
        if top is None or len(self.prompt_logprobs) < len(self.info.prompt_token_ids):
            return None, None
        return tuple(self.prompt_logprobs), tuple(self.prompt_top_logprobs) if top else None

    def to_score(self, index: int) -> ScoreSample:
        """Return the message that asks the reference model to score a finished sample.

        The first sample's includes the prompt if the request wants the prompt's logprobs.
        """
        info, prompt = self.info, self.info.prompt_token_ids
        assert info.ref_temperature is not None
        return ScoreSample(
            request_id=info.request_id,
            entry_id=info.entry_id,
            sample_index=index,
            token_ids=(*prompt, *self.samples[index].token_ids),
            start=1 if self._scores_prompt(index) else len(prompt),
            temperature=info.ref_temperature,
        )

    def absorb_scored(self, scored: SampleScored) -> None:
        """Set the reference model's logprobs of a sample. Repeated scores are ignored."""
        index, logprobs = scored.sample_index, scored.logprobs
        if index not in self.unscored:
            return
        self.unscored.remove(index)
        if logprobs:
            split = len(logprobs) - len(self.samples[index].token_ids)
            self.samples[index].ref_logprobs = logprobs[split:]
            if self._scores_prompt(index):
                self.prompt_ref_logprobs = (None, *logprobs[:split])

    def _scores_prompt(self, index: int) -> bool:
        return index == 0 and self.info.prompt_logprobs is not None

    def stored(self) -> StoredResponse | None:
        """Return the response for the response cache; None if a part of it can't be kept.

        A request that was cut short has an aborted sample, or one that has not begun.
        """
        samples = [sample for _, sample in sorted(self.samples.items())]
        stored = [sample.stored() for sample in samples]
        versions = {(sample.weight_version, sample.adapter_version) for sample in samples}
        if self.restored or len(versions) != 1 or len(samples) != self.info.n:
            return None
        whole = tuple(sample for sample in stored if sample is not None)
        if len(whole) < len(stored):
            return None
        return StoredResponse(whole, *versions.pop(), self.info.keeps)

    def add(self, index: int, pieces: Pieces) -> Sample:
        """Add a sample."""
        sample = self.samples[index] = Sample(self, index, pieces)
        return sample

    def finish(self, sample: Sample) -> None:
        """Note that a sample has finished; with a reference model, it is to be scored."""
        if self.info.ref_temperature is not None:
            self.unscored.add(sample.index)


@dataclass(slots=True, eq=False)
class Sample:
    """One sample.

    Attributes:
        seq_id: Its sequence; a different one in each epoch.
        token_ids: All tokens, also those whose text is not shown (stop tokens, and tokens of a
            stop string).
        logprobs: Of each token.
        top_logprobs: At each position; empty unless requested.
        texts: Pieces of the text so far.
        finish_reason: None before it finishes.
        ref_logprobs: The reference model's; None before they are known.
        weight_version: Of the last token's weights; -1 before the first token.
        weight_versions: (version, position of the first token computed with it).
        adapter_version: Of the last token's adapter; 0 without one.
        first_adapter_version: Of the first token's adapter.
        embedding: The prompt's vector; None for a sample of tokens.
        num_draft_tokens: Verified draft tokens since this object exists.
        num_accepted_draft_tokens: The accepted ones of them.
    """

    request: RequestState
    index: int
    pieces: InitVar[Pieces]
    seq_id: int = -1
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TokenLogprobs] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    ref_logprobs: tuple[float, ...] | None = None
    weight_version: int = -1
    weight_versions: list[tuple[int, int]] = field(default_factory=list)
    adapter_version: int = 0
    first_adapter_version: int = 0
    embedding: tuple[float, ...] | None = None
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    _detokenizer: Detokenizer = field(init=False)
    _stops: StopStrings | None = field(init=False)
    _reports: bool = field(init=False)
    # Whether the text of each token is needed at once. If not, it is made at the end in one go.
    _live: bool = field(init=False)
    # If not live: of how many tokens the text is made.
    _num_read: int = 0

    def __post_init__(self, pieces: Pieces) -> None:
        info = self.request.info
        self._detokenizer = Detokenizer(pieces)
        self._stops = StopStrings(info.stop) if info.stop else None
        self._reports = info.logprobs > 0
        self._live = info.stream or self._stops is not None

    def advance(
        self,
        token_id: int,
        logprob: float,
        reason: RowFinish,
        weight_version: int,
        top_logprobs: TopLogprobs = (),
        adapter_version: int = 0,
    ) -> str:
        """Add the next token, and set `finish_reason` if the sample ends with it.

        A stop token (`reason` "stop") counts, but its text is never shown, special token or not, as
        in vLLM. A stop string turns any reason into "stop"; the text of the first `min_tokens`
        tokens can't be part of one.

        Hot path: it runs for each token of each sample. Without a stream and stop strings all text
        comes with the last token.

        Returns:
            The text that is now certain.
        """
        if weight_version != self.weight_version or adapter_version != self.adapter_version:
            self._change_versions(weight_version, adapter_version)
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if self._reports:
            self.top_logprobs.append(token_logprobs(top_logprobs))
        if not (reason or self._live):
            return ""
        text, matched = "", False
        if not self._live:
            text = self._read(len(self.token_ids) - (reason == "stop"))
        elif reason != "stop":
            text, matched = self._advance_text(token_id)
        if matched:
            self.finish_reason = "stop"
        elif reason:
            self.finish_reason = reason
            text += self._rest()
        if text:
            self.texts.append(text)
        return text

    def repeat(
        self,
        stored: StoredSample,
        start: int,
        stop: int,
        weight_version: int,
        adapter_version: int,
    ) -> str:
        """Add the tokens `start` to `stop` of a stored sample; return their text."""
        last = len(stored.token_ids) - 1
        text = ""
        for place in range(start, min(stop, last + 1)):
            text += self.advance(
                stored.token_ids[place],
                stored.logprobs[place],
                stored.finish_reason if place == last else "",
                weight_version,
                stored.top_logprobs[place] if stored.top_logprobs else (),
                adapter_version,
            )
        return text

    def stored(self) -> StoredSample | None:
        """Return the finished sample for the response cache; None if it was cut short, or several
        versions of weights or adapter made it."""
        reason = self.finish_reason
        changed = (
            len(self.weight_versions) > 1 or self.adapter_version != self.first_adapter_version
        )
        if changed or reason is None or reason == "abort" or reason == "content_filter":
            return None
        by_text = self._stops is not None and self._stops.matched
        tops = tuple(tuple((top.token_id, top.logprob) for top in at) for at in self.top_logprobs)
        tokens = tuple(self.token_ids), tuple(self.logprobs)
        return StoredSample(*tokens, tops, "" if by_text else reason)

    def pool(self, prompt: PooledPrompt, weight_version: int) -> None:
        """Set the prompt's vector, with which the sample ends."""
        vector = array("f", prompt.vector)
        if sys.byteorder == "big":
            vector.byteswap()
        self.embedding = tuple(vector)
        self.weight_versions = [(weight_version, 0)]
        self.adapter_version = self.first_adapter_version = prompt.adapter_version
        self.finish_reason = "stop"

    def restore(self, chunk: CompletionChunk) -> None:
        """Add tokens that this process or another one has delivered.

        Text follows from tokens alone, so detokenizer and stop strings get to the same state.
        """
        tops = chunk.top_logprobs or ((),) * len(chunk.token_ids)
        if chunk.token_ids:
            self._change_versions(chunk.weight_version, chunk.adapter_version)
        for token_id, logprob, top in zip(chunk.token_ids, chunk.logprobs, tops, strict=True):
            self.token_ids.append(token_id)
            self.logprobs.append(logprob)
            if self._reports:
                self.top_logprobs.append(top)
            if chunk.finish_reason is None:
                self._advance_text(token_id)
        self._num_read = len(self.token_ids)
        self.texts.append(chunk.text)
        self.finish_reason = chunk.finish_reason

    def abort(self) -> str:
        """End the sample where it is, and return the text that was held back."""
        self.finish_reason = "abort"
        text = ("" if self._live else self._read(len(self.token_ids))) + self._rest()
        self.texts.append(text)
        return text

    def chunk(self, offset: int, text: str) -> CompletionChunk:
        """Return a chunk with the tokens from `offset` on."""
        info = self.request.info
        prompt_logprobs, prompt_tops = None, None
        if not offset and not self.index and self.token_ids:
            prompt_logprobs, prompt_tops = self.request.reported_prompt()
        return CompletionChunk(
            request_id=info.request_id,
            entry_id=info.entry_id,
            sample_index=self.index,
            token_offset=offset,
            token_ids=tuple(self.token_ids[offset:]),
            logprobs=tuple(self.logprobs[offset:]),
            text=text,
            finish_reason=self.finish_reason,
            weight_version=max(0, self.weight_version),
            top_logprobs=self._tops(offset),
            prompt_logprobs=prompt_logprobs,
            prompt_top_logprobs=prompt_tops,
            adapter_version=self.adapter_version,
        )

    def result(self) -> CompletionSample:
        """Return the finished sample. Its weight version is that of its first token."""
        spans = tuple(self.weight_versions)
        return CompletionSample(
            sample_index=self.index,
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason or "abort",
            weight_version=spans[0][0] if spans else 0,
            weight_versions=spans if self.token_ids else (),
            top_logprobs=self._tops(0),
            ref_logprobs=self.ref_logprobs,
            adapter_version=self.first_adapter_version,
            embedding=self.embedding,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_draft_tokens=self.num_accepted_draft_tokens,
        )

    def _tops(self, offset: int) -> tuple[TokenLogprobs, ...] | None:
        return tuple(self.top_logprobs[offset:]) if self._reports else None

    def _change_versions(self, weight_version: int, adapter_version: int) -> None:
        """Set the versions of the weights and the adapter from the next token on."""
        if weight_version != self.weight_version:
            self.weight_version = weight_version
            self.weight_versions.append((weight_version, len(self.token_ids)))
        if not self.token_ids:
            self.first_adapter_version = adapter_version
        self.adapter_version = adapter_version

    def _read(self, end: int) -> str:
        """Return the text of the tokens from `_num_read` to `end`."""
        start, self._num_read = self._num_read, end
        return self._detokenizer.push(self.token_ids[start:end])

    def _advance_text(self, token_id: int) -> tuple[str, bool]:
        """Return the text that the last token makes certain, and whether a stop string matches."""
        text = self._detokenizer.push((token_id,))
        if self._stops is None or len(self.token_ids) <= self.request.info.min_tokens:
            return text, False
        return self._stops.push(text)

    def _rest(self) -> str:
        """End the text: a partial stop string, then U+FFFD for an incomplete character.

        U+FFFD is not text of the model, so it completes no stop string.
        """
        incomplete = self._detokenizer.finish()
        held = self._stops.finish() if self._stops is not None else ""
        return held + incomplete


def token_logprobs(top: TopLogprobs) -> TokenLogprobs:
    """Convert top logprobs from the internal form to the public one."""
    return tuple(TokenLogprob(token_id=token_id, logprob=value) for token_id, value in top)
