"""What one request, and each of its samples, has produced so far."""

from __future__ import annotations

from ...bus.messages import CompletionSample, FinishReason, RequestInfo
from .detokenizer import Detokenizer, TokenPieces
from .stop_strings import StopStrings


class RequestState:
    """A request in flight.

    Attributes:
        samples: Those that have started, by index.
        unfinished: How many of the n samples have not finished, started or not.
        cached_tokens: Prompt tokens that needed no computing, summed over the samples.
        executed_ns: When the first step with any of its samples began on the device.
        step_end_ns: When the last step with any of its samples had its tokens on the host.
        first_step_end_ns: The same of the first step that brought a token; 0 before.
        first_token_ns: When that token came here; 0 before.
    """

    __slots__ = (
        "cached_tokens",
        "executed_ns",
        "first_step_end_ns",
        "first_token_ns",
        "info",
        "samples",
        "step_end_ns",
        "unfinished",
    )

    def __init__(self, info: RequestInfo, executed_ns: int) -> None:
        self.info = info
        self.samples: dict[int, Sample] = {}
        self.unfinished = info.n
        self.cached_tokens = 0
        self.executed_ns = executed_ns
        self.step_end_ns = 0
        self.first_step_end_ns = 0
        self.first_token_ns = 0

    def add(self, index: int, pieces: TokenPieces) -> Sample:
        """A new sample of this request."""
        sample = self.samples[index] = Sample(self, index, pieces)
        return sample


class Sample:
    """One sample.

    Attributes:
        seq_id: The sequence that makes it; another one in each epoch.
        token_ids: All tokens, also those whose text is not shown (stop tokens, and tokens of a
            stop string).
        finish_reason: None while it goes on.
    """

    __slots__ = (
        "_detokenizer",
        "_logprobs",
        "_stops",
        "_texts",
        "_weight_version",
        "finish_reason",
        "index",
        "request",
        "seq_id",
        "token_ids",
    )

    def __init__(self, request: RequestState, index: int, pieces: TokenPieces) -> None:
        self.request = request
        self.index = index
        self.seq_id = -1
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._logprobs: list[float] = []
        self._texts: list[str] = []
        self._weight_version = 0
        self._detokenizer = Detokenizer(pieces)
        self._stops = StopStrings(request.info.stop) if request.info.stop else None

    def advance(self, token_id: int, logprob: float, reason: str, weight_version: int) -> str:
        """Takes the next token; returns the text that is now certain and sets `finish_reason`.

        A stop token ("stop" from the executor) counts, but its text is never shown, special token
        or not; vLLM does the same.

        Args:
            reason: The executor's: "", "stop" or "length". A stop string turns it into "stop".
        """
        if not self.token_ids:
            self._weight_version = weight_version
        self.token_ids.append(token_id)
        self._logprobs.append(logprob)
        text, matched = "", False
        if reason != "stop":
            text = self._detokenizer.push((token_id,))
            if self._stops is not None:
                text, matched = self._stops.push(text)
        if matched:
            self.finish_reason = "stop"
        elif reason:
            self.finish_reason = "stop" if reason == "stop" else "length"
            text += self._rest()
        if text:
            self._texts.append(text)
        return text

    def abort(self) -> str:
        """Ends the sample where it is; returns the text that was held back."""
        self.finish_reason = "abort"
        text = self._rest()
        self._texts.append(text)
        return text

    def result(self) -> CompletionSample:
        """The finished sample. Its weight version is that of its first token, the oldest one."""
        return CompletionSample(
            sample_index=self.index,
            text="".join(self._texts),
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self._logprobs),
            finish_reason=self.finish_reason or "abort",
            weight_version=self._weight_version,
        )

    def _rest(self) -> str:
        """The text ends: an incomplete character, and what looked like a stop string's beginning.

        U+FFFD for that character is no text of the model's, so it completes no stop string.
        """
        incomplete = self._detokenizer.finish()
        held = self._stops.finish() if self._stops is not None else ""
        return held + incomplete
