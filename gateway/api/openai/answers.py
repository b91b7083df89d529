"""From our outputs to OpenAI's answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ....bus.public import Completion, CompletionSample, Output, Usage
from ....text.messages import MessageFormat
from ...serving.logprobs import Scored, TokenNames, logprobs_by_id, scored
from ...serving.measures import Measures
from ...serving.message_parts import MessageParts
from ...serving.words import Words
from .deltas import finish_reason, whole_message
from .logprobs import CompletionLogprobs, chat_logprobs, token_logprobs
from .requests import Call, Prompt

Answer = dict[str, Any]
Spans = Sequence[tuple[int, int]]

_READING = 8
"""How much longer it takes to read a token of a message than to list one."""


class Answers:
    """Writes the answer to a call.

    Attributes:
        call: What the client asked for.
        prompts: Texts, or their tokens where the answer takes those.
        words: The tokenizer, where that takes it.
    """

    def __init__(
        self,
        call: Call,
        prompts: list[Prompt],
        texts: list[str | None],
        words: Words | None,
        form: MessageFormat | None = None,
        measures: Measures | None = None,
    ) -> None:
        """Args:
        texts: The prompts that came as texts, None for the others.
        form: How the model writes the messages that are read.
        measures: What is told of them.
        """
        self.call = call
        self.prompts = prompts
        self._texts = texts
        self._form = form
        self._measures = measures
        self.words = words
        self.names = None if words is None else TokenNames(words, as_ids=call.as_token_ids)

    def whole(self, completions: list[Completion]) -> Answer:
        """All choices in one piece.

        Args:
            completions: Of each prompt.
        """
        reasoning = 0 if self.call.reading is not None else None
        choices: list[Answer] = []
        for prompt, completion in enumerate(completions):
            for sample in _samples(completion, self.call.n):
                parts = self.parts(len(choices)) if self.call.reading is not None else None
                choices.append(self._choice(prompt, completion, sample, parts))
                if parts is not None and reasoning is not None:
                    reasoning += parts.reasoning_tokens
        versions = [
            sample.weight_version
            for completion in completions
            for sample in completion.samples
            if sample.token_ids
        ]
        answer = self.head(min(versions, default=None), chunk=False)
        answer |= {"choices": choices, "usage": self.usage(completions, reasoning)}
        if self.call.chat and self.call.token_ids:
            answer["prompt_token_ids"] = self.prompts[0]
        if self.call.kind != "completions" and self.call.prompt_logprobs:
            answer["prompt_logprobs"] = self._prompt_logprobs(0, completions[0])
        return answer

    def head(self, version: int | None, *, chunk: bool) -> Answer:
        """What an answer, or a chunk of one, begins with.

        Args:
            version: Of the weights that made the oldest of its tokens; None without any.
        """
        told = {
            "created": self.call.created,
            "model": self.call.model,
            "system_fingerprint": None if version is None else f"weights-{version}",
        }
        if self.call.kind == "generate":
            named = {"id": self.call.id, "request_id": self.call.named or self.call.id}
            return named | told
        kind = "chat.completion" if self.call.chat else "text_completion"
        kind = f"{kind}.chunk" if chunk and self.call.chat else kind
        return {"id": self.call.id, "object": kind} | told

    def usage(
        self, completions: Iterable[Completion], reasoning_tokens: int | None = None
    ) -> Answer:
        """Of all prompts together. Each counts once, however many choices it has."""
        prompt = cached = made = accepted = rejected = 0
        for completion in completions:
            usage = self._usage(completion)
            prompt += usage.prompt_tokens
            cached += usage.cached_tokens // self.call.n
            made += usage.completion_tokens
            accepted += usage.accepted_prediction_tokens
            rejected += usage.rejected_prediction_tokens
        told = usage_of(prompt, made, cached, reasoning_tokens)
        # Of who predicts nothing it is told only where the engine drafts.
        if accepted or rejected or self.call.prediction:
            told.setdefault("completion_tokens_details", {}).update(
                accepted_prediction_tokens=accepted, rejected_prediction_tokens=rejected
            )
        return told

    def work(self, completions: Iterable[Completion]) -> int:
        """How much there is to do for the whole answer, in tokens that have only to be listed."""
        made = scored_tokens = 0
        for completion in completions:
            made += completion.usage.completion_tokens
            scored_tokens += len(completion.prompt_logprobs or ())
        listed = (made + scored_tokens) * (1 + (self.call.logprobs or 0))
        return listed + (made * _READING if self.call.reading is not None else 0)

    # --- pieces of a choice -------------------------------------------------------------------

    def parts(self, index: int, *, told: bool = True) -> MessageParts | None:
        """What reads a choice; None where its text goes out as it comes.

        Args:
            told: Whether its end is told by this answer, which counts it.
        """
        call = self.call
        # These tell of tokens, which have to be those of the text beside them.
        listed = call.logprobs is not None or call.token_ids or call.weight_versions
        if self.words is None or call.kind == "generate" or call.scores_only:
            return None
        if call.reading is None and not listed:
            return None
        seed = f"{call.id}/{index}"
        measures = self._measures if told else None
        return MessageParts(
            self.words, call.sampling, self._form, call.reading, seed, measures=measures
        )

    @property
    def shown_reasoning(self) -> str:
        """What reasoning is called; empty where it is not shown."""
        return self.call.reasoning_field if self.call.include_reasoning else ""

    def echoed(self, prompt: int) -> str:
        """The text that stands before a choice's own."""
        if not self.call.echo:
            return ""
        if (text := self._texts[prompt]) is not None:
            return text
        token_ids = self.prompts[prompt]
        assert self.words is not None, "echo takes the tokenizer"
        assert not isinstance(token_ids, str), "a prompt without a text is tokens"
        return self.words.text(token_ids, skip_special=True)

    def scored_prompt(self, prompt: int, output: Output) -> list[Scored]:
        """A prompt's tokens, when its logprobs are known."""
        token_ids = self.prompts[prompt]
        if isinstance(token_ids, str) or output.prompt_logprobs is None:
            return []
        return scored(token_ids, output.prompt_logprobs, output.prompt_top_logprobs)

    def completion_logprobs(self) -> CompletionLogprobs | None:
        """What makes the logprobs of a choice of `/v1/completions`; None when none are shown."""
        if self.call.logprobs is None or self.words is None or self.names is None:
            return None
        return CompletionLogprobs(self.words, self.names)

    def listed_logprobs(self, tokens: Sequence[Scored]) -> Answer | None:
        """Those of a choice of the other calls, which have an entry for each token."""
        if self.call.logprobs is None:
            return None
        if self.call.kind == "generate":
            return token_logprobs(tokens)
        assert self.names is not None, "logprobs of texts take the tokenizer"
        return chat_logprobs(tokens, self.names)

    # --- the whole of it ----------------------------------------------------------------------

    def _usage(self, completion: Completion) -> Usage:
        usage = completion.usage
        if not self.call.scores_only:
            return usage
        return Usage(prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens)

    def _choice(
        self,
        prompt: int,
        completion: Completion,
        sample: CompletionSample,
        parts: MessageParts | None,
    ) -> Answer:
        call = self.call
        if call.scores_only:
            sample = _without_tokens(sample)
        tokens = scored(sample.token_ids, sample.logprobs, sample.top_logprobs)
        choice: Answer = {"index": prompt * call.n + sample.sample_index}
        reason: str = sample.finish_reason
        if call.chat:
            message = {"role": "assistant", "content": sample.text, "refusal": None}
            if parts is not None:
                message = whole_message(parts.end(sample).deltas, self.shown_reasoning)
                reason = finish_reason(reason, parts)
            choice |= {"message": message, "logprobs": self.listed_logprobs(tokens)}
        elif call.kind == "generate":
            choice["logprobs"] = self.listed_logprobs(tokens)
        else:
            choice["text"] = self.echoed(prompt) + sample.text
            if writer := self.completion_logprobs():
                before = self.scored_prompt(prompt, completion) if call.echo else []
                choice["logprobs"] = writer.add([*before, *tokens])
            else:
                choice["logprobs"] = None
        choice["finish_reason"] = reason
        if call.token_ids:
            choice["token_ids"] = sample.token_ids
            if call.kind == "completions":
                choice["prompt_token_ids"] = self.prompts[prompt]
        if call.weight_versions:
            spans = sample.weight_versions
            choice["weight_versions"] = version_spans(spans, 0, len(sample.token_ids))
        if call.prompt_logprobs and call.kind == "completions":
            choice["prompt_logprobs"] = self._prompt_logprobs(prompt, completion)
        return choice

    def _prompt_logprobs(self, prompt: int, completion: Completion) -> list[Any] | None:
        tokens = self.scored_prompt(prompt, completion)
        return logprobs_by_id(tokens, self.names) if tokens and self.names else None


def usage_of(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int | None = None,
    reasoning_tokens: int | None = None,
) -> Answer:
    """Usage as OpenAI has it; in the midst of a stream nobody knows what was cached.

    Args:
        reasoning_tokens: None where no messages are read.
    """
    details = None if cached_tokens is None else {"cached_tokens": cached_tokens}
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": details,
    }
    if reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return usage


def version_spans(spans: Spans, first: int, end: int) -> list[Answer]:
    """Which weights made which of the tokens from `first` to before `end`."""
    ends = [*(begin for _, begin in spans), end][1:]
    return [
        {"version": version, "start": max(begin, first), "end": min(stop, end)}
        for (version, begin), stop in zip(spans, ends, strict=True)
        if max(begin, first) < min(stop, end)
    ]


def _samples(completion: Completion, n: int) -> list[CompletionSample]:
    """All n; one that never began has no tokens."""
    made = {sample.sample_index: sample for sample in completion.samples}
    return [made.get(index, unbegun(index)) for index in range(n)]


def unbegun(index: int) -> CompletionSample:
    """A sample that was ended before it began."""
    return CompletionSample(
        sample_index=index, text="", token_ids=(), logprobs=(), finish_reason="abort"
    )


def _without_tokens(sample: CompletionSample) -> CompletionSample:
    reason = sample.finish_reason
    return CompletionSample(
        sample_index=sample.sample_index,
        text="",
        token_ids=(),
        logprobs=(),
        finish_reason="abort" if reason == "abort" else "length",
    )
