"""From completions to OpenAI's answers: choices as a whole, or growing in a stream."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import Any

import msgspec

from ....bus.public import (
    Completion,
    CompletionChunk,
    CompletionSample,
    FinishReason,
    Output,
    Usage,
    VersionLag,
    mask_ids,
)
from ....bus.routed_experts import experts_of_sample
from ....bus.targets import target_array
from ....text.messages import Delta, MessageFormat
from ...call import Account
from ...server.measures import Measures
from ...serving.arrays import npy_text
from ...serving.logprobs import (
    TextLogprobs,
    TokenNames,
    logprobs_by_id,
    token_entries,
)
from ...serving.message_parts import MessageParts, NewParts, TokenRecord, records_of
from ...serving.samples import all_samples, session_usage
from ...serving.times import time_usage
from ...serving.token_images import ranges_of
from ...serving.tokenizer import READING, Tokenizer, matched_stop
from ...serving.tools import tool_call
from .custom_tools import custom_call
from .positions import FINISHED, UNBEGUN
from .requests import ChoicesCall, Prompt

Answer = dict[str, Any]

_UNSET: Answer = dict.fromkeys(("service_tier", "kv_transfer_params", "ec_transfer_params"))
_UNSET_OF_CHATS: Answer = dict.fromkeys(("prompt_logprobs", "prompt_token_ids"))
"""Fields of vLLM's answers that are null: its clients read them as attributes."""


@dataclass(eq=False)
class ChoicesWriter:
    """Writes the answer to a call.

    Attributes:
        call: The call.
        prompts: Texts, or their tokens where the answer needs those.
        texts: The prompts that came as texts, None for the others.
        tokenizer: The tokenizer, where the answer needs it.
        form: The model's message format, where messages are read.
        measures: Metrics about messages.
    """

    call: ChoicesCall
    prompts: list[Prompt]
    texts: list[str | None]
    tokenizer: Tokenizer | None
    form: MessageFormat | None = None
    measures: Measures | None = None

    @cached_property
    def names(self) -> TokenNames | None:
        """The names of tokens, where the answer needs the tokenizer."""
        if self.tokenizer is None:
            return None
        return TokenNames(self.tokenizer, as_ids=self.call.as_token_ids)

    def whole(self, completions: list[Completion]) -> Answer:
        """Return the whole answer. Args: `completions` are in the order of the prompts."""
        choices: list[Answer] = []
        reasoning = 0
        if self.call.fork is not None:
            self.prompts = [completion.prompt_token_ids for completion in completions]
        for prompt, completion in enumerate(completions):
            prompt_logprobs = self._prompt_logprobs(prompt, completion)
            for sample in all_samples(completion, self.call.n):
                choice = Choice(self, prompt, sample.sample_index, whole=True)
                choice.score_prompt(self.scored_prompt(prompt, completion))
                choice.end(sample, completion)
                choices.append(choice.take() | self._experts(completion, sample))
                if self.call.kind == "completions":
                    choices[-1] |= self._targets(completion)
                    choices[-1]["prompt_logprobs"] = prompt_logprobs
                    choices[-1].setdefault("prompt_token_ids", None)
                reasoning += choice.reasoning_tokens
        answer = self.head(oldest_version(completions), chunk=False)
        reads = self.call.reading is not None
        usage = self.usage(completions, reasoning if reads else None)
        answer |= {"choices": choices, "usage": usage}
        if self.call.fork is not None and (origin := completions[0].fork) is not None:
            answer["fork"] = msgspec.to_builtins(origin)
        if self.call.kind != "generate":
            answer |= _UNSET | (_UNSET_OF_CHATS if self.call.chat else {})
        answer |= self.shown_prompt()
        if self.call.chat and self.call.token_ids:
            answer["prompt_token_ids"] = self.prompts[0]
        if self.call.prompt_logprobs and self.call.kind != "completions":
            answer["prompt_logprobs"] = self._prompt_logprobs(0, completions[0])
        if self.call.kind != "completions":
            answer |= self._targets(completions[0])
        return answer

    def head(self, version: int | None, *, chunk: bool) -> Answer:
        """Return the beginning of an answer, or of a chunk.

        Args:
            version: Version of the weights that made the oldest of its tokens; None without tokens.
        """
        head = {
            "created": self.call.created,
            "model": self.call.model,
            "system_fingerprint": None if version is None else f"weights-{version}",
        }
        if self.call.kind == "generate":
            return {"id": self.call.id, "request_id": self.call.named or self.call.id} | head
        head |= {"request_id": self.call.named} if self.call.named else {}
        kind = "chat.completion" if self.call.chat else "text_completion"
        kind = f"{kind}.chunk" if chunk and self.call.chat else kind
        return {"id": self.call.id, "object": kind} | head

    def shown_prompt(self) -> Answer:
        """Return the fields with a prompt of tokens; {} for an answer that doesn't show it."""
        places = self.call.places
        if places is None:
            return {}
        ranges = ranges_of(places) if places else None
        return {"prompt_token_ids": self.prompts[0], "mm_placeholders": ranges}

    def usage(
        self,
        completions: Iterable[Completion],
        reasoning_tokens: int | None = None,
        account: Account | None = None,
    ) -> Answer:
        """Sum up the usage of all prompts. Each counts once, however many choices it has.

        Args:
            completions: Completions of all prompts.
            reasoning_tokens: None where no messages are read.
            account: As of `time_usage`.
        """
        completions = list(completions)
        usages = [completion.usage for completion in completions]
        scores_only = self.call.scores_only
        of_sessions = [session_usage(completion) for completion in completions]
        usage = usage_of(
            sum(usage.prompt_tokens for usage in usages),
            0 if scores_only else sum(usage.completion_tokens for usage in usages),
            sum(usage.cached_tokens // self.call.n for usage in usages),
            reasoning_tokens,
        )
        if scores_only:
            usages = [Usage()]
        accepted = sum(usage.accepted_prediction_tokens for usage in usages)
        rejected = sum(usage.rejected_prediction_tokens for usage in usages)
        # Without a prediction of the client's, only where the engine drafts.
        if accepted or rejected or self.call.prediction:
            usage.setdefault("completion_tokens_details", {}).update(
                accepted_prediction_tokens=accepted, rejected_prediction_tokens=rejected
            )
        if cached := sum(usage.cached_completion_tokens for usage in usages):
            usage.setdefault("completion_tokens_details", {}).update(cached_tokens=cached)
        usage |= time_usage(completions, account)
        for of_session in of_sessions:  # one: a turn has one prompt
            usage |= of_session
        return usage

    def work(self, completions: Iterable[Completion]) -> int:
        """Return the cost of writing the whole answer, in tokens that are only listed."""
        made = scored_tokens = 0
        for completion in completions:
            made += completion.usage.completion_tokens
            scored_tokens += len(completion.prompt_logprobs or ())
        listed = (made + scored_tokens) * (1 + (self.call.logprobs or 0))
        return listed + (made * READING if self.call.reading is not None else 0)

    @property
    def shown_reasoning(self) -> str:
        """The field of a message that has the reasoning; "" where it is not shown."""
        return self.call.reasoning_field if self.call.include_reasoning else ""

    def message(self, deltas: Sequence[Delta], *, whole: bool) -> Answer:
        """Write deltas of a message as the delta of one chunk, or as the whole message."""
        return message_of(deltas, self.shown_reasoning, self.call.custom_tools, whole=whole)

    def echoed(self, prompt: int) -> str:
        """Return the text before a choice's own."""
        if not self.call.echo:
            return self.call.before
        if (text := self.texts[prompt]) is not None:
            return text
        token_ids = self.prompts[prompt]
        assert self.tokenizer is not None, "echo takes the tokenizer"
        assert not isinstance(token_ids, str), "a prompt without a text is tokens"
        return self.tokenizer.text(token_ids, skip_special=True)

    def scored_prompt(self, prompt: int, output: Output) -> list[TokenRecord]:
        """Return a prompt's tokens, when its logprobs are known."""
        token_ids = self.prompts[prompt]
        if isinstance(token_ids, str) or output.prompt_logprobs is None:
            return []
        records = records_of(token_ids, output.prompt_logprobs, output.prompt_top_logprobs)
        ranks = output.prompt_token_ranks or [None] * len(records)
        return [each._replace(rank=rank) for each, rank in zip(records, ranks, strict=True)]

    def _experts(self, completion: Completion, sample: CompletionSample) -> Answer:
        """Return the routed experts of a choice and its prompt, if they were requested."""
        if (experts := experts_of_sample(completion, sample)) is None:
            return {}
        if self.call.scores_only:
            experts = experts[: len(experts) - len(sample.token_ids)]
        return {"routed_experts": npy_text(experts)}

    def _targets(self, completion: Completion) -> Answer:
        """Return the logprobs of targets in the prompt, if there are any."""
        wanted, found = (
            self.call.sampling.prompt_logprob_token_ids,
            completion.prompt_token_id_logprobs,
        )
        if wanted is None or found is None:
            return {}
        return {"prompt_token_id_logprobs": npy_text(target_array(wanted, found))}

    def _prompt_logprobs(self, prompt: int, completion: Completion) -> list[Any] | None:
        if not self.call.prompt_logprobs or self.names is None:
            return None
        tokens = self.scored_prompt(prompt, completion)
        return logprobs_by_id(tokens, self.names) if tokens else None


class Choice:
    """A choice with its unsent part: chunk by chunk, or as a whole.

    Attributes:
        index: In the answer.
        begun: Whether a chunk of it was sent.
        finished: Whether its last chunk was put together.
        waits_for_prompt: Whether it can't begin before the prompt's logprobs, which come with the
            first sample.
        received: Number of received tokens, and their text where the answer shows both.
    """

    def __init__(
        self,
        answers: ChoicesWriter,
        prompt: int,
        sample: int,
        after: int = UNBEGUN,
        *,
        whole: bool = False,
    ) -> None:
        """Args:
        after: The position up to which the choice was sent before. That part comes again, and is
            not sent again. Where text goes out as it comes, an event holds whole chunks of the
            bus; where parts are read, whole tokens.
        whole: Whether the choice is written in one piece, as a message and not as deltas.
        """
        self._answers = answers
        self._prompt = prompt
        self._whole = whole
        self.index = prompt * answers.call.n + sample
        call = answers.call
        self._parts = MessageParts(
            answers.tokenizer,
            call.sampling,
            answers.form,
            call.reading,
            f"{call.id}/{self.index}",
            # In a stream, tokens that are listed have to be those of the text beside them.
            by_tokens=call.lists_tokens and call.kind != "generate" and not whole,
            # What was sent before was counted then.
            measures=answers.measures if after != FINISHED else None,
        )
        # Each with the place of the token that brought it.
        self._deltas: list[tuple[int, Delta]] = []
        self._logprobs: TextLogprobs | None = None
        if call.kind == "completions" and call.logprobs is not None:
            assert answers.names is not None, "logprobs of texts take the tokenizer"
            self._logprobs = TextLogprobs(answers.names)
        self._tokens: list[TokenRecord] = []
        self._version: int | None = None
        self._sent_tokens = 0
        self._sent_before = self._passed = max(0, after)
        # Tokens that were sent before, until the offsets of what follows are known.
        self._skipped: list[TokenRecord] = []
        self._skips_prompt = after != UNBEGUN
        self._reason: str | None = None
        self._lag: VersionLag | None = None
        self._stopped_by: int | str | None = None
        self._scored_prompt: list[TokenRecord] = []
        self.waits_for_prompt = call.echo and call.logprobs is not None and not whole
        self.begun = after != UNBEGUN
        self.finished = after == FINISHED
        self.received = 0

    @property
    def version(self) -> int | None:
        """Return the version of the weights of the first unsent token, or of the last sent one."""
        return self._tokens[0].version if self._tokens else self._version

    @property
    def due(self) -> bool:
        """Whether there is anything to send."""
        call = self._answers.call
        if self.waits_for_prompt:
            return False
        texts = call.kind != "generate" and bool(self._deltas)
        return texts or (call.lists_tokens and bool(self._tokens)) or self._reason is not None

    @property
    def unsent(self) -> int:
        """Tokens that have come and were not sent."""
        return len(self._tokens)

    @property
    def reasoning_tokens(self) -> int:
        """The number of reasoning tokens so far."""
        return self._parts.reasoning_tokens

    @property
    def sent(self) -> int:
        """The position up to which the choice was sent."""
        if self.finished and self._reason is None:
            return FINISHED
        return max(self._sent_tokens, self._passed) if self.begun else UNBEGUN

    def score_prompt(self, tokens: Sequence[TokenRecord]) -> None:
        """Set the prompt's tokens, which an echo shows in the first chunk."""
        self.waits_for_prompt = False
        self._scored_prompt = [*tokens] if self._answers.call.echo else []

    def add(self, chunk: CompletionChunk) -> None:
        """Add the next tokens."""
        self._add(self._parts.add(chunk), chunk.finish_reason)

    def end(self, sample: CompletionSample, completion: Completion) -> None:
        """Add what did not come in chunks, of a sample that has ended."""
        call = self._answers.call
        if sample.finish_reason == "stop" and (call.sampling.stop or call.sampling.stop_token_ids):
            matched = matched_stop(sample, call.sampling, self._answers.tokenizer)
            own = isinstance(matched, str) or matched in call.sampling.stop_token_ids
            self._stopped_by = matched if own else None
        self._lag = sample.version_lag
        self._add(self._parts.end(sample), sample.finish_reason)

    def role(self) -> Answer:
        """Return the first chunk of a chat's choice."""
        self.begun = True
        delta = {"role": "assistant", "content": self._answers.call.before}
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def take(self) -> Answer:
        """Return the unsent part. In a stream it may be the part that has to stand before the
        rest; then the choice is still due."""
        call, answers = self._answers.call, self._answers
        deltas, tokens = self._next() if self._deltas else ([], self._tokens)
        text = "".join(delta.content for delta in deltas)
        reason = None
        # Clients take a call for complete when a chunk without calls comes, the reason's as well.
        if self._whole or not (self._deltas or any(delta.calls for delta in deltas)):
            reason, self._reason = self._reason, None
        choice: Answer = {"index": self.index}
        if call.chat and self._whole:
            deltas = [Delta(content=call.before), *(deltas or [Delta(content=text)])]
            choice["message"] = answers.message(deltas, whole=True)
        elif call.chat and call.reading is not None:
            choice["delta"] = answers.message(deltas, whole=False)
        elif call.chat:
            choice["delta"] = {"content": text} if text or reason is None else {}
        elif call.kind == "completions":
            choice["text"] = ("" if self.begun else answers.echoed(self._prompt)) + text
        choice["logprobs"] = self._written_logprobs(tokens)
        choice["finish_reason"] = reason
        if reason is not None and call.kind != "generate":
            choice["stop_reason"] = self._stopped_by
        if self._whole and call.kind != "generate":
            choice["token_ids"] = None
        if self._whole and self._lag is not None:
            choice["version_lag"] = msgspec.to_builtins(self._lag)
        if call.token_ids:
            choice["token_ids"] = [token.token_id for token in tokens]
            if not self.begun and call.kind == "completions":
                choice["prompt_token_ids"] = answers.prompts[self._prompt]
        masks = [token.mask for token in tokens if token.mask is not None]
        if call.sampling.return_sampling_mask and len(masks) == len(tokens):
            choice["sampling_mask"] = [*map(mask_ids, masks)]
        if call.fields.return_weight_versions:
            as_text = call.kind == "generate"
            choice["weight_versions"] = version_spans(tokens, self._sent_tokens, as_text=as_text)
        self.begun = True
        self._pass(len(tokens))
        return choice

    def _add(self, new: NewParts, reason: FinishReason | None) -> None:
        if self._answers.call.scores_only:
            new = NewParts([], [], [])
        if self.finished:  # perhaps by what was sent before
            self.received += len(new.records)
            return
        records = new.records
        self._tokens += records
        if self.received < self._sent_before:
            passed = min(self._sent_before - self.received, len(records))
            if self._logprobs is not None:
                self._skipped += records[:passed]
            self._pass(passed)
        self.received += len(records)
        for place, delta in zip(new.places, new.deltas, strict=True):
            if delta.reasoning and not self._answers.shown_reasoning:
                delta = delta._replace(reasoning="")
            if place >= self._sent_before and any(delta):
                self._deltas.append((place, delta))
        if reason is not None:
            self._end(reason)

    def _next(self) -> tuple[list[Delta], list[TokenRecord]]:
        """Take the deltas of the next chunk, or of the whole; with the tokens beside them."""
        deltas = [delta for _, delta in self._deltas]
        number = len(deltas) if self._whole else fitting(deltas)
        tokens = self._tokens
        if number < len(deltas):
            tokens = tokens[: self._deltas[number][0] - self._sent_tokens]
        # After what the end brings: by one more than there are tokens.
        self._passed = self._deltas[number - 1][0] + 1
        self._deltas = self._deltas[number:]
        return deltas[:number], tokens

    def _pass(self, number: int) -> None:
        """Drop the first tokens, which were sent."""
        if number:
            self._version = self._tokens[number - 1].version
        self._tokens = self._tokens[number:]
        self._sent_tokens += number

    def _written_logprobs(self, tokens: list[TokenRecord]) -> Answer | None:
        """Write the logprobs of tokens, after those of an echoed prompt."""
        call = self._answers.call
        if self._logprobs is not None:
            if self._skips_prompt:
                self._logprobs.add([*self._scored_prompt, *self._skipped])
                self._skips_prompt, self._scored_prompt, self._skipped = False, [], []
            shown, self._scored_prompt = [*self._scored_prompt, *tokens], []
            return self._logprobs.add(shown) if shown or self._whole else None
        if call.logprobs is None:
            return None
        if call.kind == "generate":
            return {"content": token_entries(tokens, None)}
        if not (tokens or self._whole):
            return None
        return {"content": token_entries(tokens, self._answers.names), "refusal": None}

    def _end(self, reason: FinishReason) -> None:
        scores_only = self._answers.call.scores_only
        self._reason = "length" if scores_only and reason != "abort" else reason
        # A complete call counts only in a complete message.
        if self._parts.calls and reason == "stop":
            self._reason = "tool_calls"
        self.finished = True


def message_of(
    deltas: Sequence[Delta],
    reasoning_field: str,
    custom_tools: Collection[str] = (),
    *,
    whole: bool,
) -> Answer:
    """Write deltas of a chat's message as the delta of one chunk, or as the whole message.

    Args:
        reasoning_field: "" where the reasoning is not shown.
        custom_tools: Names of custom tools, of whose calls the input is shown.
    """
    reasoning = "".join(delta.reasoning for delta in deltas)
    content = "".join(delta.content for delta in deltas)
    calls = [call for delta in deltas for call in delta.calls]
    message: Answer = {}
    if whole:
        shown = None if calls and not content else content
        message = {"role": "assistant", "content": shown, "refusal": None}
        if reasoning_field:
            message[reasoning_field] = None
    if reasoning and reasoning_field:
        message[reasoning_field] = reasoning
    if content and not whole:
        message["content"] = content
    if calls:
        message["tool_calls"] = [
            ({} if whole else {"index": call.place})
            | (
                custom_call(call.id, call.name, call.arguments)
                if call.name in custom_tools
                else tool_call(call.id, call.name, call.arguments)
            )
            for call in calls
        ]
    return message


def fitting(deltas: Sequence[Delta]) -> int:
    """Return how many of the first deltas fit one chunk. Clients read the reasoning of a chunk
    before its text, and its text before its calls."""
    if len(deltas) == 1:
        return 1
    last = 0
    for number, delta in enumerate(deltas):
        kinds = [kind for kind, part in enumerate(delta) if part]
        if kinds and kinds[0] < last:
            return number
        last = kinds[-1] if kinds else last
    return len(deltas)


def usage_of(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int | None = None,
    reasoning_tokens: int | None = None,
) -> Answer:
    """Write usage as OpenAI does.

    Args:
        cached_tokens: None before the end of a stream.
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


def version_spans(
    tokens: Iterable[TokenRecord], first: int, *, as_text: bool = False
) -> list[Answer]:
    """Return the weight versions of the tokens from `first` on, run by run; as texts for clients
    of vLLM's `WeightVersionSpan`."""
    spans: list[Answer] = []
    for version, same in groupby(tokens, attrgetter("version")):
        start, shown = spans[-1]["end"] if spans else first, str(version) if as_text else version
        spans.append({"version": shown, "start": start, "end": start + len(list(same))})
    return spans


def oldest_version(completions: Iterable[Completion]) -> int | None:
    """Return the oldest weight version of any sample with tokens; None without tokens."""
    return min(
        (
            sample.weight_version
            for completion in completions
            for sample in completion.samples
            if sample.token_ids
        ),
        default=None,
    )
