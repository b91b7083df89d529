"""From our outputs to OpenAI's answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...bus.public import Completion, CompletionSample, Output, Usage
from ..words import Words
from .logprobs import (
    CompletionLogprobs,
    Scored,
    TokenNames,
    chat_logprobs,
    prompt_logprobs,
    scored,
    token_logprobs,
)
from .requests import Call, Prompt

Answer = dict[str, Any]
Spans = Sequence[tuple[int, int]]


class Answers:
    """Writes the answer to a call.

    Attributes:
        call: What the client asked for.
        prompts: Texts, or their tokens where the answer takes those.
        words: The tokenizer, where that takes it.
    """

    def __init__(
        self, call: Call, prompts: list[Prompt], texts: list[str | None], words: Words | None
    ) -> None:
        """`texts`: the prompts that came as texts, None for the others."""
        self.call = call
        self.prompts = prompts
        self._texts = texts
        self.words = words
        self.names = None if words is None else TokenNames(words, as_ids=call.as_token_ids)

    def whole(self, completions: list[Completion]) -> Answer:
        """All choices in one piece.

        Args:
            completions: Of each prompt.
        """
        choices = [
            self._choice(prompt, completion, sample)
            for prompt, completion in enumerate(completions)
            for sample in _samples(completion, self.call.n)
        ]
        versions = [
            sample.weight_version
            for completion in completions
            for sample in completion.samples
            if sample.token_ids
        ]
        answer = self.head(min(versions, default=None), chunk=False)
        answer |= {"choices": choices, "usage": self.usage(completions)}
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

    def usage(self, completions: Iterable[Completion]) -> Answer:
        """Of all prompts together. Each counts once, however many choices it has."""
        prompt = cached = made = 0
        for completion in completions:
            usage = self._usage(completion)
            prompt += usage.prompt_tokens
            cached += usage.cached_tokens // self.call.n
            made += usage.completion_tokens
        return usage_of(prompt, made, cached)

    # --- pieces of a choice -------------------------------------------------------------------

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

    def _choice(self, prompt: int, completion: Completion, sample: CompletionSample) -> Answer:
        call = self.call
        if call.scores_only:
            sample = _without_tokens(sample)
        tokens = scored(sample.token_ids, sample.logprobs, sample.top_logprobs)
        choice: Answer = {"index": prompt * call.n + sample.sample_index}
        if call.chat:
            message = {"role": "assistant", "content": sample.text, "refusal": None}
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
        choice["finish_reason"] = sample.finish_reason
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
        return prompt_logprobs(tokens, self.names) if tokens and self.names else None


def usage_of(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None
) -> Answer:
    """Usage as OpenAI has it; in the midst of a stream nobody knows what was cached."""
    details = None if cached_tokens is None else {"cached_tokens": cached_tokens}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": details,
    }


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
