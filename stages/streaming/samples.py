"""The state of one request, and of each of its samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from ...bus.entries import entry_key
from ...bus.messages import RequestOpened, RowFinish, TopLogprobs
from ...bus.public import (
    CompletionChunk,
    CompletionSample,
    FinishReason,
    StageTime,
    TokenLogprob,
    token_columns,
)
from ...bus.recovery import RecoveredSample
from ...text.detokenizer import Detokenizer, Pieces
from .stop_strings import StopStrings

TokenLogprobs = tuple[TokenLogprob, ...]


@dataclass(slots=True, eq=False)
class RequestState:
    """A request in flight.

    Attributes:
        pieces: Text pieces of the detokenizer.
        samples: Samples that have started, by index.
        cached_tokens: Prompt tokens that needed no computing, summed over the samples.
        queued: When fairness held the request; None if unknown.
        executed_ns: When its first step began on the device; 0 before.
        step_end_ns: When its last step had its tokens on the host.
        first_step_end_ns: When the first step with a result had it on the host; 0 before.
        first_token_ns: When the first token arrived here; 0 before.
        last_token_ns: When the last token so far arrived.
        restored: Begun by a predecessor of this stage, so that times are unknown.
        unasked: Begun in an older epoch, and admission has not recovered it in this one.
        waits: Finished samples, by index, for which a part still waits.
        prompt_fields: Fields of parts in the Completion and in the first sample's first chunk.
        notes: State of parts, by part.
    """

    info: RequestOpened
    pieces: Pieces
    samples: dict[int, Sample] = field(default_factory=dict)
    cached_tokens: int = 0
    queued: StageTime | None = None
    executed_ns: int = 0
    step_end_ns: int = 0
    first_step_end_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    restored: bool = False
    unasked: bool = False
    waits: set[int] = field(default_factory=set)
    prompt_fields: dict[str, Any] = field(default_factory=dict)
    notes: dict[Any, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The identity of its entry."""
        return entry_key(self.info.entry_id, self.info.request_id)

    @property
    def is_done(self) -> bool:
        """Whether all n samples have finished, and no part waits."""
        finished = sum(sample.finish_reason is not None for sample in self.samples.values())
        return finished == self.info.n and not self.waits

    def progress(self) -> tuple[RecoveredSample, ...]:
        """Return the tokens so far of each sample."""
        return tuple(
            RecoveredSample(each.index, tuple(each.token_ids), each.finish_reason is not None)
            for each in self.samples.values()
        )

    def add(self, index: int) -> Sample:
        """Add a sample."""
        sample = self.samples[index] = Sample(self, index)
        return sample


@dataclass(slots=True, eq=False)
class Sample:
    """One sample.

    Attributes:
        seq_id: Its sequence; a different one in each epoch.
        token_ids: All tokens, also those whose text is not shown (stop tokens, and tokens of a
            stop string).
        logprobs: Logprob of each token.
        top_logprobs: At each position; empty unless requested.
        texts: Pieces of the text so far.
        finish_reason: None before it finishes.
        weight_version: Version of the last token's weights; -1 before the first token.
        weight_versions: (version, position of the first token computed with it).
        adapter_version: Version of the next tokens' adapter; 0 without one.
        first_adapter_version: Version of the first token's adapter.
        retracted: Its tokens are about to be dropped: it begins anew.
        fields: Fields of parts in the CompletionSample.
        columns: Columns of tokens, by their field in chunks and in the CompletionSample. A step's
            values come before its tokens, also those after a stop string.
    """

    request: RequestState
    index: int
    seq_id: int = -1
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TokenLogprobs] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    weight_version: int = -1
    weight_versions: list[tuple[int, int]] = field(default_factory=list)
    adapter_version: int = 0
    first_adapter_version: int = 0
    retracted: bool = False
    fields: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    _detokenizer: Detokenizer = field(init=False)
    _stops: StopStrings | None = field(init=False)
    _reports: bool = field(init=False)
    # Whether the text of each token is needed at once. If not, it is made at the end in one go.
    _live: bool = field(init=False)
    # If not live: of how many tokens the text is made.
    _num_read: int = 0

    def __post_init__(self) -> None:
        info = self.request.info
        self._detokenizer = Detokenizer(self.request.pieces)
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
        if weight_version != self.weight_version:
            self._change_weights(weight_version)
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

    def begin_anew(self) -> None:
        """Drop all tokens."""
        self.seq_id = self.weight_version = -1
        self.retracted = False
        self.adapter_version = self.first_adapter_version = self._num_read = 0
        kept = self.token_ids, self.logprobs, self.top_logprobs, self.texts, self.weight_versions
        for each in kept:
            each.clear()
        self.fields.clear()
        self.columns.clear()
        self.__post_init__()

    def set_adapter(self, version: int) -> None:
        """Set the version of the adapter that computes the next tokens."""
        if not self.token_ids:
            self.first_adapter_version = version
        self.adapter_version = version

    @property
    def ended_by_text(self) -> bool:
        """Whether a stop string has ended it."""
        return self._stops is not None and self._stops.matched

    def restore(self, chunk: CompletionChunk) -> None:
        """Add tokens that this process or another one has delivered.

        Text follows from tokens alone, so detokenizer and stop strings get to the same state.
        """
        tops = chunk.top_logprobs or ((),) * len(chunk.token_ids)
        if chunk.token_ids:
            self.set_adapter(chunk.adapter_version)
            if chunk.weight_version != self.weight_version:
                self._change_weights(chunk.weight_version)
        for name, values in token_columns(chunk).items():
            self.columns.setdefault(name, []).extend(values)
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
        info, prompt = self.request.info, self.request.prompt_fields
        chunk = CompletionChunk(
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
            adapter_version=self.adapter_version,
        )
        if self.columns:
            chunk = replace(chunk, **self.columns_of(offset))
        if prompt and not offset and not self.index and self.token_ids:
            return replace(chunk, **prompt)
        return chunk

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
            adapter_version=self.first_adapter_version,
            **self.fields,
            **self.columns_of(0),
        )

    def columns_of(self, offset: int) -> dict[str, Any]:
        """Return the columns of the tokens from `offset` on.

        A column without the first tokens, which an older version has delivered, is left out.
        """
        end, columns = len(self.token_ids), self.columns
        return {name: tuple(each[offset:end]) for name, each in columns.items() if len(each) >= end}

    def _tops(self, offset: int) -> tuple[TokenLogprobs, ...] | None:
        return tuple(self.top_logprobs[offset:]) if self._reports else None

    def _change_weights(self, version: int) -> None:
        """Set the version of the weights from the next token on."""
        self.weight_version = version
        self.weight_versions.append((version, len(self.token_ids)))

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
