"""Replay: a finished request computed again, and compared with what is recorded of it.

The recipe of a Completion has what computes its samples again. The replay is an ordinary request at
the present weights; its prompt is computed from the first token on, and it shares no KV with other
requests. Where a sample parts from the recorded one, the recorded tokens are scored as well, so
that the logprobs after that position can be compared, too. docs/replay.md.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal

import msgspec
from msgspec.structs import asdict, replace

from ..bus.public import (
    Completion,
    CompletionSample,
    Fingerprint,
    FinishReason,
    GenerateRequest,
    ImageInput,
    Recipe,
    TokenLogprob,
    token_columns,
)
from ..config import RequestError, SamplingParams, shown

PRIORITY = -100
"""Priority of replays: below that of other requests, which go first; waiting adds to it."""

UNKNOWN = "unknown"


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Something that the bits depend on, and that is different now.

    Attributes:
        name: "weight_version", "adapter_version", or a field of Fingerprint, as "torch" or
            "settings.logprobs_mode".
        recorded, present: Its values; null for a setting at its default.
    """

    name: str
    recorded: Any
    present: Any


class Parting(msgspec.Struct, frozen=True, kw_only=True):
    """The first position at which a sample differs from the recorded one, in token or logprob.

    Attributes:
        position: Index of the token in the sample.
        recorded, computed: The former and the present value; null where a sample has ended before.
    """

    position: int
    recorded: TokenLogprob | None
    computed: TokenLogprob | None


class ReplayedSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one version of the weights in a sample.

    Attributes:
        weight_version: As recorded.
        comparable: Whether the weights of that version computed them again.
        start, stop: Its tokens, `stop` exclusive.
        equal_logprobs: Tokens whose logprobs are equal to the bit.
    """

    weight_version: int
    comparable: bool
    start: int
    stop: int
    equal_logprobs: int


class ReplayedSample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample, recorded and computed again.

    Attributes:
        sample_index: Its index.
        tokens: Recorded tokens.
        equal_tokens: Leading tokens that were sampled again.
        compared_logprobs: Logprobs that could be compared: of the tokens before the first other
            one, and of those after it where the recorded tokens could be scored.
        equal_logprobs: Number of compared logprobs that are equal to the bit.
        largest_difference: Largest difference between two compared logprobs; 0 without one.
        parting: The first difference; null if it never does.
        finish_reason, computed_finish_reason: As recorded, and now.
        spans: By the version of the weights.
        different: Other parts that differ, as "top_logprobs" or "embedding".
    """

    sample_index: int
    tokens: int
    equal_tokens: int
    compared_logprobs: int
    equal_logprobs: int
    largest_difference: float
    parting: Parting | None
    finish_reason: FinishReason
    computed_finish_reason: FinishReason
    spans: tuple[ReplayedSpan, ...]
    different: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether all of it is equal."""
        return self.parting is None and not self.different


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a replay.

    Attributes:
        request_id: Request id of the recorded request.
        verdict: "equal": all that is recorded was computed again, to the bit.
        summary: The verdict as a sentence.
        tokens, logprobs: Recorded tokens; their logprobs that were compared, over all samples.
        samples: Each sample.
        differences: Known differences from then.
        reasons: Why results differ or can't be compared, as far as known; sentences.
        different: Other parts of the completion that differ, as "prompt_logprobs".
    """

    request_id: str
    verdict: Literal["equal", "different"]
    summary: str
    tokens: int
    logprobs: int
    samples: tuple[ReplayedSample, ...]
    differences: tuple[Difference, ...] = ()
    reasons: tuple[str, ...] = ()
    different: tuple[str, ...] = ()


def unknown(id: str) -> RequestError:
    """Return the error for an id without a record."""
    return RequestError(
        f"nothing is recorded of a request {shown(id)}: it is in flight, or its result has expired "
        "(bus.results_ttl_s, bus.results_maxlen), or the id is another one",
        code="unknown_request",
        remedy="wait for its end, or send it again",
    )


async def replay(
    complete: Callable[[GenerateRequest], Awaitable[Completion]],
    recorded: Completion,
    like: GenerateRequest = GenerateRequest(priority=PRIORITY),  # noqa: B008  (it is frozen)
    at: int | None = None,
) -> Replay:
    """Compute a request again, and compare.

    Args:
        complete: Returns a request's terminal message.
        recorded: Its terminal message of then.
        like: A request with the tenant, priority and budget_ns to use.
        at: The version that the present weights have in the record; None for their own number.

    Raises:
        RequestError: `not_replayable`: the record lacks what is needed. Or the replay was refused
            or has failed: the code is that of its error.
    """
    steps = replaying(recorded, like, at)
    request, result = next(steps), None
    while result is None:
        request, result = _next(steps, await complete(request))
    return result


def replay_here(
    complete: Callable[[GenerateRequest], Completion], recorded: Completion, at: int | None
) -> Replay:
    """Replay like `replay`, on the caller's thread."""
    steps = replaying(recorded, GenerateRequest(), at)
    request, result = next(steps), None
    while result is None:
        request, result = _next(steps, complete(request))
    return result


Steps = Generator[GenerateRequest, Completion, Replay]


def _next(steps: Steps, completion: Completion) -> tuple[GenerateRequest, Replay | None]:
    """Return the next request, or the result."""
    try:
        return steps.send(completion), None
    except StopIteration as end:
        return GenerateRequest(), end.value


def replaying(recorded: Completion, like: GenerateRequest, at: int | None) -> Steps:
    """Yield requests, receive their terminal messages, and return the result. As `replay`."""
    recipe = check_replayable(recorded)
    asked = request_of(recorded, recipe, like)
    computed = yield asked
    if computed.error is not None:
        raise RequestError(
            f"the replay has failed: {computed.error.message}", code=computed.error.code
        )
    comparisons = [
        _Compared(sample, again, at)
        for sample, again in zip(recorded.samples, computed.samples, strict=False)
    ]
    reasons: list[str] = []
    for each in comparisons:
        if each.rest and (why := _why_not_scored(recipe)):
            reasons.append(f"the {each.rest} logprobs after that can't be compared: {why}")
        elif each.rest:
            scored = yield _scoring(recorded, recipe, each.sample, asked)
            if scored.error is not None:
                why = scored.error.message
                reasons.append(f"the {each.rest} logprobs after that were not compared: {why}")
            else:
                each.add_scores(scored.prompt_logprobs or ())
    return _result(recorded, recipe, computed, comparisons, reasons)


def check_replayable(recorded: Completion) -> Recipe:
    """Return the recipe of a completion. Raises RequestError: not_replayable."""
    name = shown(recorded.request_id or recorded.entry_id)
    if recorded.recipe is None:
        raise RequestError(
            f"request {name} has no recipe: it ended before it ran, or its pipeline had "
            "admission.recipes off; only completions with one can be computed again",
            code="not_replayable",
        )
    if not any(sample.token_ids or sample.embedding for sample in recorded.samples):
        raise RequestError(
            f"request {name} has no result to compare with: it ended as {recorded.status} before "
            "its first token",
            code="not_replayable",
        )
    return recorded.recipe


def request_of(recorded: Completion, recipe: Recipe, like: GenerateRequest) -> GenerateRequest:
    """Return the request that computes a recorded one again."""
    samples, embed = recorded.samples, recipe.embed
    sampling = replace(recipe.sampling, response_cache=False)
    if samples and all(sample.finish_reason == "abort" for sample in samples):
        # Cut short: no more is computed than was.
        longest = max(1, *(len(sample.token_ids) for sample in samples))
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, longest))
    return replace(
        like,
        request_id="",
        prompt=None,
        messages=None,
        prompt_token_ids=recorded.prompt_token_ids,
        model=recipe.adapter or like.model,
        n=1 if embed is not None else len(samples),
        sampling=sampling if embed is None else SamplingParams(),
        stream=False,
        # Of its own, so that no KV of another request is read: a replay is a check of that, too.
        cache_salt=f"replay-{uuid.uuid4().hex}",
        embed=embed,
        prediction=None,
        kv_session=None,
        images=tuple(ImageInput(id=id) for id in recipe.images),
        # An image is found for its tenant alone.
        tenant=recipe.tenant if recipe.images else like.tenant,
        sample_seeds=tuple(recipe.seeds[sample.sample_index] for sample in samples)
        if recipe.seeds
        else (),
    )


def _scoring(
    recorded: Completion, recipe: Recipe, sample: CompletionSample, asked: GenerateRequest
) -> GenerateRequest:
    """Return the request for the logprobs of a recorded sample's tokens."""
    return replace(
        asked,
        prompt_token_ids=(*recorded.prompt_token_ids, *sample.token_ids),
        n=1,
        sampling=SamplingParams(
            max_tokens=1,
            ignore_eos=True,
            temperature=recipe.sampling.temperature,
            prompt_logprobs=0,
            response_cache=False,
        ),
        sample_seeds=(),
    )


def _why_not_scored(recipe: Recipe) -> str:
    """Return why scores of given tokens are of another distribution than sampled tokens'."""
    sampling, plain = recipe.sampling, SamplingParams()
    if any(each.settings.get("logprobs_mode") == "raw" for each in recipe.executors):
        return ""
    names = (
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "min_tokens",
        "constraint",
    )
    given = [name for name in names if getattr(sampling, name) != getattr(plain, name)]
    return f"the scores of given tokens don't have {', '.join(given)}" if given else ""


# --- comparison -----------------------------------------------------------------------------------


def same_bits(first: float | None, second: float | None) -> bool:
    """Return whether two numbers are the same one, zeros with their sign."""
    return first == second and str(first) == str(second)


class _Compared:
    """A recorded sample beside the computed one.

    Attributes:
        sample: As recorded.
        rest: Logprobs that are still to be compared, since tokens differ before them.
    """

    def __init__(self, sample: CompletionSample, computed: CompletionSample, at: int | None):
        self.sample, self._computed = sample, computed
        self.at = computed.weight_version if at is None else at
        pairs = zip(sample.token_ids, computed.token_ids, strict=False)
        self._same = next(
            (position for position, (old, new) in enumerate(pairs) if old != new),
            min(len(sample.token_ids), len(computed.token_ids)),
        )
        # By position; None where nothing is known.
        self._now: list[float | None] = [*computed.logprobs[: self._same]]
        self.rest = len(sample.token_ids) - self._same

    def add_scores(self, prompt_logprobs: Sequence[float | None]) -> None:
        """Add the logprobs of prompt and sample, scored as one prompt."""
        scores = prompt_logprobs[len(prompt_logprobs) - len(self.sample.token_ids) :]
        self._now += scores[self._same :]

    def result(self) -> ReplayedSample:
        """Return the comparison."""
        sample, computed = self.sample, self._computed
        pairs = list(zip(sample.logprobs, self._now, strict=False))
        equal = [same_bits(*pair) for pair in pairs]
        gaps = [abs(old - new) for old, new in pairs if new is not None]
        return ReplayedSample(
            sample_index=sample.sample_index,
            tokens=len(sample.token_ids),
            equal_tokens=self._same,
            compared_logprobs=len(pairs),
            equal_logprobs=sum(equal),
            largest_difference=max(gaps, default=0.0),
            parting=self._parting(equal[: self._same]),
            finish_reason=sample.finish_reason,
            computed_finish_reason=computed.finish_reason,
            spans=tuple(self._spans(equal)),
            different=self._different(),
        )

    def _parting(self, equal: Sequence[bool]) -> Parting | None:
        position = next((position for position, same in enumerate(equal) if not same), self._same)
        old, new = _token(self.sample, position), _token(self._computed, position)
        if old is None and (new is None or not self._is_whole):
            return None
        return Parting(position=position, recorded=old, computed=new)

    @property
    def _is_whole(self) -> bool:
        """Whether the sample ended by itself."""
        return self.sample.finish_reason in ("stop", "length")

    def _spans(self, equal: Sequence[bool]) -> Iterable[ReplayedSpan]:
        sample = self.sample
        starts = [*sample.weight_versions, (0, len(sample.token_ids))]
        for (version, start), (_, stop) in pairwise(starts):
            yield ReplayedSpan(
                weight_version=version,
                comparable=version == self.at,
                start=start,
                stop=stop,
                equal_logprobs=sum(equal[start:stop]),
            )

    def _different(self) -> tuple[str, ...]:
        """Return the names of other parts that differ, as far as tokens are equal."""
        old, new, found = self.sample, self._computed, []
        if self._is_whole and not self.rest and old.finish_reason != new.finish_reason:
            found.append("finish_reason")
        tops = old.top_logprobs, new.top_logprobs
        if None not in tops and not _equal(*(each[: self._same] for each in tops if each)):
            found.append("top_logprobs")
        now = token_columns(new)
        for name, was in token_columns(old).items():
            if not _equal(was[: self._same], now.get(name, ())[: self._same]):
                found.append(name)
        if old.embedding is not None and not _equal(old.embedding, new.embedding):
            found.append("embedding")
        scores = old.ref_logprobs, new.ref_logprobs
        if None not in scores and not self.rest and not _equal(*scores):
            found.append("ref_logprobs")
        return tuple(found)


def _token(sample: CompletionSample, position: int) -> TokenLogprob | None:
    if position >= len(sample.token_ids):
        return None
    return TokenLogprob(token_id=sample.token_ids[position], logprob=sample.logprobs[position])


def _equal(*values: Any) -> bool:
    """Return whether all values are equal, numbers to the bit."""
    return len({msgspec.json.encode(value) for value in values}) <= 1


_OF_PROMPTS = (
    *("prompt_logprobs", "prompt_top_logprobs"),
    *("prompt_token_id_logprobs", "prompt_routed_experts"),
)


# --- the result -----------------------------------------------------------------------------------


def _result(
    recorded: Completion,
    recipe: Recipe,
    computed: Completion,
    comparisons: Sequence[_Compared],
    reasons: list[str],
) -> Replay:
    samples = tuple(each.result() for each in comparisons)
    different = tuple(
        name
        for name in _OF_PROMPTS
        if getattr(recorded, name) is not None
        and not _equal(getattr(recorded, name), getattr(computed, name))
    )
    equal = not different and all(sample.equal for sample in samples)
    differences = _differences(recorded, recipe, computed, [each.at for each in comparisons])
    if not equal:
        reasons = [*reasons, *_reasons(recorded, recipe, computed, samples, differences)]
    tokens = sum(sample.tokens for sample in samples)
    compared = sum(sample.compared_logprobs for sample in samples)
    return Replay(
        request_id=recorded.request_id or recorded.entry_id,
        verdict="equal" if equal else "different",
        summary=_summary(recorded, samples, tokens, compared, different, equal=equal),
        tokens=tokens,
        logprobs=compared,
        samples=samples,
        differences=differences,
        reasons=tuple(dict.fromkeys(reasons)),
        different=different,
    )


def _summary(
    recorded: Completion,
    samples: Sequence[ReplayedSample],
    tokens: int,
    compared: int,
    different: Sequence[str],
    *,
    equal: bool,
) -> str:
    vectors = [each.embedding for each in recorded.samples if each.embedding is not None]
    if equal and vectors:
        return f"equal: a vector of {len(vectors[0])} numbers, to the bit"
    if equal:
        return f"equal: {tokens} tokens, {compared} logprobs to the bit"
    for sample in samples:
        if (parting := sample.parting) is not None:
            return (
                f"parts at sample {sample.sample_index}, token {parting.position}: recorded "
                f"{_shown(parting.recorded)}, computed {_shown(parting.computed)}"
            )
    names = [*different, *(name for sample in samples for name in sample.different)]
    return f"the tokens are equal, and these differ: {', '.join(dict.fromkeys(names))}"


def _shown(token: TokenLogprob | None) -> str:
    return "its end" if token is None else f"{token.token_id} ({token.logprob!r})"


def _differences(
    recorded: Completion, recipe: Recipe, computed: Completion, present: Sequence[int]
) -> tuple[Difference, ...]:
    found: list[Difference] = []

    def add(name: str, old: object, new: object) -> None:
        if old != new:
            found.append(Difference(name=name, recorded=old, present=new))

    for sample, version, again in zip(recorded.samples, present, computed.samples, strict=False):
        for old in dict(sample.weight_versions) or {sample.weight_version: 0}:
            add("weight_version", old, version)
        if recipe.adapter:
            add("adapter_version", sample.adapter_version, again.adapter_version)
    now = () if computed.recipe is None else computed.recipe.executors
    if not {each.digest for each in now} & {each.digest for each in recipe.executors}:
        old_fields, new_fields = (_fields(*each[:1]) for each in (recipe.executors, now))
        for name in dict.fromkeys((*old_fields, *new_fields)):
            missing = UNKNOWN if not (recipe.executors and now) else None
            add(name, old_fields.get(name, missing), new_fields.get(name, missing))
    return tuple({each.name + repr(each.recorded): each for each in found}.values())


def _fields(*executor: Fingerprint) -> dict[str, Any]:
    """Return the fields of a fingerprint, settings each by its own name; {} without one."""
    if not executor:
        return {}
    fields = asdict(executor[0])
    del fields["digest"]
    settings: dict[str, Any] = fields.pop("settings")
    return {**fields, **{f"settings.{name}": value for name, value in settings.items()}}


def _reasons(
    recorded: Completion,
    recipe: Recipe,
    computed: Completion,
    samples: Sequence[ReplayedSample],
    differences: Sequence[Difference],
) -> Iterable[str]:
    """Yield why the results may differ."""
    names = {each.name for each in differences}
    for each in differences:
        if each.name == "weight_version":
            yield (
                f"version {each.recorded} of the weights made some of the tokens, and version "
                f"{each.present} computed them now: only the weights of then give the same numbers"
            )
    if any(len(sample.spans) > 1 for sample in samples):
        yield (
            "the weights changed within a sample: after that its KV may be of the older ones "
            "(unless the update was made with in_flight: retract), and is of one version now"
        )
    if any(len(again.weight_versions) > 1 for again in computed.samples):
        yield "the weights changed during the replay: repeat it"
    if "adapter_version" in names:
        yield "the adapter has other weights now"
    if fields := sorted(names - {"weight_version", "adapter_version"}):
        yield f"another executor computes now; it differs in: {', '.join(fields)}"
    modes = {
        each.deterministic
        for made in (recipe, computed.recipe)
        if made is not None
        for each in made.executors
    }
    if "off" in modes:
        yield "without deterministic mode the last bits of numbers depend on the other requests"
    elif recipe.adapter and "without adapters" in modes:
        yield "engine.deterministic: auto doesn't cover requests with an adapter"
    elif not names:
        yield (
            "nothing that is recorded differs: weights of one version number can be of two runs; "
            "otherwise this is a defect of the software or the machine, so please report it"
        )
    if len(recipe.executors) > 1:
        yield "the lane had several kinds of executors, and which one computed it isn't recorded"
