"""Promises that soak.py checks: one terminal message each, the same tokens, times that add up."""

from __future__ import annotations

import hashlib
import random
import sys
from collections import Counter
from typing import Any

import time_checks
from interfaces import GUEST, SECOND, Answer, Ask
from msgspec.structs import replace

from nano_inference import BusClient, Completion

LABELS = ("A", "B")
"""Names of weights: even versions are as loaded, odd versions have another last norm."""


def label_of(version: int) -> str:
    return LABELS[version % 2]


class Ledger:
    """The terminal messages of all requests, as they are written.

    Attributes:
        ends: Terminal messages by request.
        statuses: Their number by status, with the code of an error.
        lives: All terminal messages, without samples.
        different: Requests with other tokens than an equal one before.
        compared: Requests that had an equal one before.
        kept: Some at random, for replays.
    """

    def __init__(self, keep: int, rng: random.Random) -> None:
        self.ends: Counter[tuple[str, str]] = Counter()
        self.statuses: Counter[str] = Counter()
        self.causes: Counter[str] = Counter()
        self.compared = 0
        self.lives: list[Completion] = []
        self.different: list[str] = []
        self.kept: list[Completion] = []
        self._keep, self._rng, self._replayable = keep, rng, 0
        self._known: dict[bytes, bytes] = {}

    async def read(self, client: BusClient) -> None:
        """Take all terminal messages from now on."""
        async for completion in await client.bus.results.tail():
            self.take(completion)

    def take(self, completion: Completion) -> None:
        self.ends[completion.request_id, completion.entry_id] += 1
        code = f" {completion.error.code}" if completion.error else ""
        self.statuses[f"{completion.status}{code}"] += 1
        self.causes.update(completion.usage.time or {})
        self.lives.append(replace(completion, samples=(), prompt_token_ids=(), recipe=None))
        if completion.status == "done" and completion.recipe is not None:
            self._compare(completion)

    def _compare(self, completion: Completion) -> None:
        recipe: Any = completion.recipe
        of_weights = {label_of(version) for version in versions_of(completion)}
        if len(of_weights) != 1:
            return
        self._replayable += 1
        if len(self.kept) < self._keep:
            self.kept.append(completion)
        elif (place := self._rng.randrange(self._replayable)) < self._keep:
            self.kept[place] = completion
        same = (completion.model, completion.prompt_token_ids, of_weights, len(completion.samples))
        parts = (recipe.sampling, recipe.seeds, recipe.images, recipe.embed, recipe.adapter)
        key = hashlib.sha256(repr((same, parts)).encode()).digest()
        result = [
            (each.token_ids, each.logprobs, each.finish_reason, each.embedding, each.top_logprobs)
            for each in completion.samples
        ]
        found = hashlib.sha256(repr(result).encode()).digest()
        if key in self._known:
            self.compared += 1
            if self._known[key] != found:
                self.different.append(f"{completion.request_id} {completion.entry_id}")
        self._known.setdefault(key, found)

    def result(self) -> dict[str, Any]:
        doubled = [f"{name} x {count}" for name, count in self.ends.items() if count > 1]
        return {
            "ended": len(self.ends),
            "statuses": dict(self.statuses.most_common()),
            "two_ends": doubled[:20],
            "compared_on_the_bus": self.compared,
            "different_on_the_bus": self.different[:20],
            "times": {
                "requests": len(self.lives),
                "wrong": time_checks.wrong_times(self.lives),
                "causes": dict(self.causes.most_common()),
            },
        }


def versions_of(completion: Completion) -> set[int]:
    """Return all versions of the weights that made the samples."""
    found = set()
    for sample in completion.samples:
        found |= {version for version, _ in sample.weight_versions} or {sample.weight_version}
    return found


class Judge:
    """Compares what clients have read with the undisturbed answers.

    Attributes:
        counts: Answers by interface, by kind, and by what is wrong.
        remarks: Violations, as sentences.
    """

    def __init__(self) -> None:
        self._known: dict[str, set[str]] = {}
        self.counts: dict[str, Counter[str]] = {
            name: Counter() for name in ("interface", "kind", "wrong", "refused", "other")
        }
        self.remarks: list[str] = []

    def learn(self, ask: Ask, answer: Answer) -> None:
        """Take an undisturbed answer."""
        if answer.faults or answer.refused:
            self.remarks.append(
                f"undisturbed {ask.kind} over {ask.interface}: {answer.faults or answer.refused} "
                f"{answer.remark}"
            )
            self.counts["wrong"]["lost"] += 1
        self._known.setdefault(ask.key, set()).add(answer.digest())

    def take(self, ask: Ask, answer: Answer, *, crossed: bool = False) -> set[str]:
        """Take an answer; return what is wrong. `crossed`: weights have changed meanwhile."""
        self.counts["interface"][ask.interface] += 1
        self.counts["kind"][ask.kind] += 1
        self.counts["other"]["returns"] += answer.returns
        wrong = set(answer.faults)
        if answer.refused:
            self.counts["refused"][answer.refused] += 1
            if ask.request.get("model") not in (GUEST, SECOND):
                wrong.add("lost")
        elif not wrong and ask.key and answer.content is not None:
            if crossed:
                self.counts["other"]["crossed an update"] += 1
            else:
                self.counts["other"]["compared"] += 1
                if answer.digest() not in self._known[ask.key]:
                    wrong.add("different")
        for each in wrong:
            self.counts["wrong"][each] += 1
        if wrong and len(self.remarks) < 50:
            self.remarks.append(
                f"{ask.kind} over {ask.interface} {ask.key}: {', '.join(sorted(wrong))} "
                f"{answer.refused} {answer.remark} {str(answer.content)[:300]}"
            )
            print(self.remarks[-1], file=sys.stderr, flush=True)
        return wrong
