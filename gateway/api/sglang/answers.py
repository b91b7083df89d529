"""`/generate`: from our outputs to SGLang's answers, whole or growing in a stream.

SGLang's events repeat all that came before, so an event at each token would cost the square of the
answer's length.
"""

from __future__ import annotations

import math
import struct
from base64 import b64encode
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import accumulate, chain, starmap
from typing import Any, assert_never

import msgspec
import numpy as np

from ....bus.public import (
    TOKEN_COLUMNS,
    Completion,
    CompletionChunk,
    CompletionSample,
    ErrorInfo,
    GenerateRequest,
    TokenLogprob,
    token_columns,
)
from ....bus.routed_experts import experts_of_sample
from ....stages.streaming.stop_strings import StopStrings
from ....text.detokenizer import Detokenizer
from ...server.http import SendEvent
from ...serving.logprobs import restricted
from ...serving.samples import Unsent, all_samples, rest_of
from ...serving.submissions import ENDED_EARLY
from ...serving.times import time_usage
from ...serving.tokenizer import Tokenizer, free_of_stops, is_stop_token, matched_stop
from ...serving.weight_sync import VersionLabels
from .requests import PromptCall

Answer = dict[str, Any]
Entry = tuple[float | None, int, str | None]
TopLogprobs = tuple[TokenLogprob, ...]
ScoredTokens = tuple[list[Entry], list[list[Entry]]]
"""`output_token_logprobs` and `output_top_logprobs`."""

_FILTERED: Answer = {
    "type": "abort",
    "message": "what follows may not be said here",
    "err_type": "content_filter",
}
"""The reason of a sample that a guardrail has ended; SGLang has no type for it."""

EVERY_TOKEN_BYTES = 8192
"""Events come at every token until they have so many bytes."""

GROWTH = 16
"""From then on when there are a sixteenth more tokens, so that all events of a sample together have
at most about 17 times the bytes of the last."""


Process = Callable[[int, Callable[[], Answer]], Awaitable[Answer]]
"""Does some work about so many listed tokens, much of it in a thread."""


class PromptWriter:
    """Writes the answers to one prompt.

    Attributes:
        tokenizer: The tokenizer, where the answer needs it.
    """

    def __init__(
        self, wanted: PromptCall, tokenizer: Tokenizer | None, labels: VersionLabels
    ) -> None:
        self.wanted = wanted
        self.tokenizer = tokenizer
        self._labels = labels
        self._growing: dict[int, Growing] = {}

    def answers(self, request: GenerateRequest, name: str) -> None:
        """Answer a request that was begun before, of the same prompt; `name`: its client's id."""
        self.wanted = msgspec.structs.replace(self.wanted, id=name, request=request)

    def final(self, completion: Completion) -> list[Answer]:
        """Return an answer for each sample. One that never began has no tokens."""
        samples = all_samples(completion, self.wanted.request.n)
        return [self.final_of(completion, sample) for sample in samples]

    def listed(self, completion: Completion, samples: Sequence[CompletionSample]) -> int:
        """Return the number of tokens that an answer lists."""
        tokens = sum(len(each.token_ids) for each in samples)
        tokens += len(completion.prompt_logprobs or ())
        return tokens * (1 + self.wanted.top_logprobs + len(self.wanted.target_ids))

    def growing(self, sample_index: int) -> Growing:
        """Return a sample of a stream."""
        if sample_index not in self._growing:
            self._growing[sample_index] = Growing(self, sample_index)
        return self._growing[sample_index]

    # --- pieces of an answer ------------------------------------------------------------------

    def scored(self, tokens: CompletionChunk) -> ScoredTokens:
        """Return `output_token_logprobs` and `output_top_logprobs`."""
        logprobs: Sequence[float] = tokens.logprobs
        if self.wanted.within_support and tokens.support_logprobs is not None:
            logprobs = [*map(restricted, logprobs, tokens.support_logprobs)]
        scored = zip(logprobs, tokens.token_ids, strict=True)
        tops = tokens.top_logprobs if self.wanted.top_logprobs else None
        return list(starmap(self._entry, scored)), list(map(self._top_entries, tops or ()))

    def answer(self, sample: CompletionSample, text: str, scored: ScoredTokens) -> Answer:
        """Return the part of an answer that is known before the end of the sample. Args: the text
        as it is shown."""
        wanted, request = self.wanted, self.wanted.request
        meta: Answer = {
            "id": f"{wanted.id}_{sample.sample_index}" if request.n > 1 else wanted.id,
            "completion_tokens": len(sample.token_ids),
            "finish_reason": None,
        }
        spans = [(self._labels.of(version), first) for version, first in sample.weight_versions]
        if spans:
            meta |= {"weight_version": spans[0][0], "weight_versions": spans}
        if wanted.logprobs:
            meta["output_token_logprobs"] = scored[0]
            if wanted.top_logprobs:
                meta["output_top_logprobs"] = scored[1]
            if sample.support_logprobs is not None:
                meta["output_support_logprobs"] = sample.support_logprobs
        if sample.sampling_masks is not None:
            meta |= _masks(sample.sampling_masks)
        return {"text": text, "output_ids": sample.token_ids, "meta_info": meta}

    def _top_entries(self, top: TopLogprobs) -> list[Entry]:
        return [self._entry(each.logprob, each.token_id) for each in top]

    # --- the whole of it ----------------------------------------------------------------------

    def final_of(self, completion: Completion, sample: CompletionSample) -> Answer:
        """Return the answer for an ended sample, of which a part may have come in chunks."""
        growing, of_engine = self._growing.get(sample.sample_index), sample
        if self.wanted.scores_only and sample.finish_reason != "abort":
            nothing: dict[str, Any] = {"text": "", "token_ids": (), "logprobs": ()}
            nothing |= {"top_logprobs": None, "ref_logprobs": None, "finish_reason": "length"}
            nothing |= dict.fromkeys(TOKEN_COLUMNS)
            sample = msgspec.structs.replace(sample, **nothing)
            growing = Growing(self, sample.sample_index)
        elif growing is None or not growing.ended:
            # Its end did not come in chunks.
            growing = Growing(self, sample.sample_index)
            for chunk in rest_of(sample):
                growing.add(chunk)
        answer = self.answer(sample, growing.text(), growing.scored)
        meta = answer["meta_info"]
        usage, n, timings = completion.usage, self.wanted.request.n, completion.timings
        elapsed_ns = timings.finished_ns - timings.received_ns if timings.received_ns else 0
        # The engine reports the sum over all samples; the first gets the remainder.
        cached = usage.cached_tokens // n
        cached += 0 if sample.sample_index else usage.cached_tokens % n
        if drafted := sample.num_draft_tokens:
            accepted = sample.num_accepted_draft_tokens
            meta |= {
                "spec_draft_token_num": drafted,
                "spec_accept_token_num": accepted,
                "spec_accept_rate": accepted / drafted,
            }
        meta |= {
            "finish_reason": self._finish_reason(sample, completion.error or ENDED_EARLY),
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": cached,
            "e2e_latency": max(0, elapsed_ns) / 1e9,
            **time_usage([completion]),
        }
        if usage.cached_completion_tokens:
            meta["cached_completion_tokens"] = len(sample.token_ids)
        if self.wanted.logprobs:
            meta |= self._prompt_logprobs(completion) | self._ref_logprobs(completion, sample)
        if self.wanted.target_ids:
            meta |= self._targets(completion)
        if (experts := experts_of_sample(completion, of_engine)) is not None:
            # Of all computed tokens, without the last sampled one.
            experts = experts[: len(experts) - len(of_engine.token_ids) + len(sample.token_ids)]
            meta["routed_experts"] = b64encode(experts.astype("<i4").tobytes()).decode()
        return answer

    def _targets(self, completion: Completion) -> Answer:
        """Return the logprobs of targets at the places of `_prompt_logprobs`."""
        found, ids = completion.prompt_token_id_logprobs, self.wanted.target_ids
        if found is None:
            return {"input_token_ids_logprobs": [], "output_token_ids_logprobs": []}
        rows = np.frombuffer(found, "<f4").reshape(-1, len(ids)).tolist()
        entries = [[*map(self._entry, row, ids)] for row in rows]
        return {"input_token_ids_logprobs": [None, *entries], "output_token_ids_logprobs": []}

    def _prompt_logprobs(self, completion: Completion) -> Answer:
        """Return the prompt's logprobs from `logprob_start` on. The prompt's first token has none.

        SGLang has none for the first one shown either; AReaL reads that as a number.
        """
        start, found = self.wanted.logprob_start, completion.prompt_logprobs
        token_ids = self.wanted.request.prompt_token_ids
        if start < 0 or found is None or token_ids is None:
            return {"input_token_logprobs": []}
        places = range(min(start, len(token_ids) - 1), len(token_ids))
        entries = [self._entry(found[place], token_ids[place]) for place in places]
        tops = completion.prompt_top_logprobs
        if tops is None:
            return {"input_token_logprobs": entries}
        shown = [self._top_entries(tops[place]) if place else None for place in places]
        return {"input_token_logprobs": entries, "input_top_logprobs": shown}

    def _ref_logprobs(self, completion: Completion, sample: CompletionSample) -> Answer:
        """Return the reference model's logprobs of the same tokens, where there is one."""
        found: Answer = {}
        if sample.ref_logprobs is not None:
            found["output_ref_logprobs"] = sample.ref_logprobs
        if completion.prompt_ref_logprobs is not None and self.wanted.logprob_start >= 0:
            start = min(self.wanted.logprob_start, len(completion.prompt_ref_logprobs) - 1)
            found["input_ref_logprobs"] = [*completion.prompt_ref_logprobs[start:]]
        return found

    def _entry(self, logprob: float | None, token_id: int) -> Entry:
        shown = self.tokenizer is not None and self.wanted.token_texts
        return (
            logprob,
            token_id,
            self.tokenizer.token(token_id) if self.tokenizer and shown else None,
        )

    # --- text and what ended it ---------------------------------------------------------------

    def free_of_stops(self, token_ids: Sequence[int]) -> int:
        """Return the length of the text in which no stop string counts."""
        assert self.tokenizer is not None
        sampling, skip = self.wanted.request.sampling, self.wanted.own.skip_special_tokens
        return free_of_stops(token_ids, sampling, self.tokenizer, skip_special=skip)

    def without_stop(self, text: str, free: int, *, ended: bool) -> str:
        """Return a text without its stop string or, before the end, without what may become one.
        Args: `free` is of `free_of_stops`."""
        stops = StopStrings(self.wanted.request.sampling.stop)
        certain, _ = stops.push(text[free:])
        return text[:free] + certain + (stops.finish() if ended else "")

    def _finish_reason(self, sample: CompletionSample, error: ErrorInfo) -> Answer:
        match sample.finish_reason:
            case "length":
                return {"type": "length", "length": len(sample.token_ids)}
            case "stop":
                matched = matched_stop(sample, self.wanted.request.sampling, self.tokenizer)
                return {"type": "stop", "matched": matched}
            case "abort":
                return {"type": "abort", "message": error.message}
            case "content_filter":
                return _FILTERED
            case unknown:
                assert_never(unknown)


def _masks(masks: Sequence[bytes]) -> Answer:
    """Return sampling masks as slime has them: all ids, and where each position's begin."""
    lengths = (len(mask) // 4 for mask in masks)
    offsets = struct.pack(f"<{len(masks) + 1}i", *accumulate(lengths, initial=0))
    arrays = {"top_p_token_ids": b"".join(masks), "top_p_token_offsets": offsets}
    return {name: b64encode(each).decode() for name, each in arrays.items()}


class Growing:
    """A sample that grows to its end. Chunks are appended; only an answer reads all of it.

    Attributes:
        scored: The logprobs of its tokens.
        final: The sample with its completion, once it has ended.
        ended: Whether its last chunk came.
    """

    def __init__(self, writer: PromptWriter, sample_index: int) -> None:
        self._writer = writer
        self._index = sample_index
        self._token_ids: list[int] = []
        self.scored: ScoredTokens = ([], [])
        self._texts: list[str] = []
        self._spans: list[tuple[int, int]] = []
        self._columns: dict[str, list[Any]] = {}
        self._free: int | None = None
        # None where the text is that of the engine.
        self._tokenizer = None if writer.wanted.plain_text else writer.tokenizer
        self._detokenizer: Detokenizer | None = None
        if self._tokenizer is not None:
            skip = writer.wanted.own.skip_special_tokens
            self._detokenizer = self._tokenizer.detokenizer(skip_special=skip)
        self.ended = False
        self.unsent = 0  # an event has all of it, however much that is
        self.final: tuple[Completion, CompletionSample] | None = None
        self._shown = 0
        self._due_at = 1

    @property
    def due(self) -> bool:
        """Whether the next event is due."""
        return self.final is not None or len(self._token_ids) >= self._due_at

    def end(self, sample: CompletionSample, completion: Completion) -> None:
        """Set the end, which has all of it."""
        self.final = completion, sample

    def add(self, chunk: CompletionChunk) -> None:
        """Add the next tokens."""
        if self._writer.wanted.scores_only:
            return
        version = chunk.weight_version
        if chunk.token_ids and (not self._spans or self._spans[-1][0] != version):
            self._spans.append((version, len(self._token_ids)))
        self._token_ids += chunk.token_ids
        for name, values in token_columns(chunk).items():
            self._columns.setdefault(name, []).extend(values)
        if self._writer.wanted.logprobs:
            entries, tops = self._writer.scored(chunk)
            self.scored[0].extend(entries)
            self.scored[1].extend(tops)
        self.ended = chunk.finish_reason is not None
        if self._detokenizer is None or self._tokenizer is None:
            self._texts.append(chunk.text)
            return
        token_ids, wanted = chunk.token_ids, self._writer.wanted
        trims = wanted.trim_stop and chunk.finish_reason == "stop" and token_ids
        if trims and is_stop_token(token_ids[-1], wanted.request.sampling, self._tokenizer):
            token_ids = token_ids[:-1]
        text = self._detokenizer.push(token_ids)
        self._texts.append(text + self._detokenizer.finish() if self.ended else text)

    def answer(self) -> Answer:
        """Return an event with all that there is."""
        self._shown = len(self._token_ids)
        columns: dict[str, Any] = {name: tuple(each) for name, each in self._columns.items()}
        sample = CompletionSample(
            sample_index=self._index,
            text="",
            token_ids=tuple(self._token_ids),
            logprobs=(),
            finish_reason="abort",
            weight_versions=tuple(self._spans),
            **columns,
        )
        return self._writer.answer(sample, self.text(), self.scored)

    async def written(self, process: Process) -> Answer:
        """Return the next event, or the last one."""
        if self.final is None:
            return self.answer()
        completion, sample = self.final
        write = partial(self._writer.final_of, completion, sample)
        return await process(self._writer.listed(completion, [sample]), write)

    def text(self) -> str:
        """Return the text as it is shown."""
        self._texts = ["".join(self._texts)]
        text, writer = self._texts[0], self._writer
        beyond = len(self._token_ids) > writer.wanted.request.sampling.min_tokens
        if self._detokenizer is None or not writer.wanted.trim_stop or not (beyond or self.ended):
            return text
        if self._free is None:
            self._free = writer.free_of_stops(self._token_ids)
        return writer.without_stop(text, self._free, ended=self.ended)

    def sent(self, size_bytes: int) -> None:
        """Set when the next event is due, after one of so many bytes."""
        rarer = math.ceil(self._shown / GROWTH) if size_bytes > EVERY_TOKEN_BYTES else 1
        self._due_at = self._shown + max(rarer, self._writer.wanted.interval_tokens)


class SampleEvents(Unsent[Growing]):
    """The events of a stream. Only the newest state of each sample waits for the client.

    The last event of a sample is its whole answer.

    Attributes:
        any_sent: Whether an event was sent, or is being sent.
    """

    def __init__(
        self, send: SendEvent, writers: Sequence[PromptWriter], process: Process, *, indexed: bool
    ) -> None:
        """`indexed`: whether an event names its sample."""
        growing = [[each.growing(i) for i in range(each.wanted.request.n)] for each in writers]
        super().__init__(growing)
        self._send, self._process, self._indexed = send, process, indexed
        self._places = {each: place for place, each in enumerate(chain.from_iterable(growing))}
        self.any_sent = False

    async def send_next(self) -> None:
        growing = next(iter(self._due))
        del self._due[growing]
        answer = await growing.written(self._process)
        where = {"index": self._places[growing]} if self._indexed else {}
        data = msgspec.json.encode(answer | where)
        growing.sent(len(data))
        self.any_sent = True
        await self._send(data)
