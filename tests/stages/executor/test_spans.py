"""The executor's spans: how long, how many tokens, how many slices; of recorded requests alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import msgspec
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from nano_inference.bus import open_bus
from nano_inference.bus.parts.speculation import DraftsResult, VerifiedDraft
from nano_inference.bus.steps import NewSequence, StepResult
from nano_inference.config import BusConfig, Config, Constraint, SamplingParams, TelemetryConfig
from nano_inference.stages.actor import StageContext
from nano_inference.stages.executor.spans import DraftCounts, ExecutorSpans
from nano_inference.stages.executor.stage import ExecutorStage
from nano_inference.telemetry import instruments, names, setup_tracing

from .plans import new_sequence, step_plan

RECORDED = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
NOT_RECORDED = RECORDED[:-1] + "0"
SUMS = (instruments.DRAFTS, instruments.DRAFT_TOKENS, instruments.ACCEPTED_TOKENS)


class Rig:
    """An executor's spans for fake steps of ten nanoseconds."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracing = setup_tracing(TelemetryConfig(), "here", self._exporter)
        context = StageContext(Config(), open_bus(BusConfig()), self.tracing)
        self.spans = ExecutorSpans(ExecutorStage(context))
        self._steps = 0

    def step(
        self, *, ends: tuple[int, ...] = (), drafts: tuple[VerifiedDraft, ...] = (), **plan: object
    ) -> None:
        """Each row of `rows` samples a token, and as many more as were accepted of its draft; those
        in `ends` their last one."""
        self._steps += 1
        rows: dict[int, int] = plan.get("rows", {})  # type: ignore[assignment]
        accepted = {draft.seq_id: draft.num_accepted for draft in drafts}
        ids = tuple(seq_id for seq_id in rows for _ in range(1 + accepted.get(seq_id, 0)))
        result = StepResult(
            *(self._steps, (), ids, (5,) * len(ids), (0.0,) * len(ids)),
            tuple(
                "stop" if seq_id in ends and seq_id != following else ""
                for seq_id, following in pairwise((*ids, None))
            ),
            *((), 0, self._steps * 10, self._steps * 10 + 10),
            parts=(DraftsResult(drafts),),
        )
        self.spans.step(step_plan(self._steps, **plan), result)

    def made(self) -> list[ReadableSpan]:
        self.tracing.flush()
        return list(self._exporter.get_finished_spans())


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.tracing.shutdown()


def new(seq_id: int, request_id: str, traceparent: str, generated: int = 0) -> NewSequence:
    made = new_sequence(seq_id, [1, 2], [0], SamplingParams(), num_generated=generated)
    changed = msgspec.structs.replace(made.info, request_id=request_id, traceparent=traceparent)
    return msgspec.structs.replace(made, info=changed)


def test_a_slice_lasts_from_the_first_sample_s_start_to_the_last_one_s_end(rig: Rig) -> None:
    rig.step(new=(new(1, "r", RECORDED), new(2, "r", RECORDED), new(3, "other", NOT_RECORDED)))
    rig.step(rows={1: 1, 3: 1})
    rig.step(rows={1: 1, 2: 1, 3: 1}, ends=(1,))
    assert rig.made() == []
    rig.step(rows={2: 1, 3: 1}, ends=(2, 3))
    executor, prefill, decode = rig.made()
    assert [span.name for span in rig.made()] == ["executor", "prefill", "decode"]
    assert executor.attributes is not None
    assert executor.attributes[names.SLICE_TOKENS] == 4
    assert (prefill.start_time, prefill.end_time) == (10, 30)
    assert (decode.start_time, decode.end_time) == (30, 50)
    assert [(event.name, event.timestamp) for event in executor.events] == [(names.FIRST_TOKEN, 30)]


def test_a_slice_ends_with_the_token_after_which_another_replica_continues(rig: Rig) -> None:
    leaving = [
        msgspec.structs.replace(new(seq_id, "r", RECORDED), hands_over=True) for seq_id in (1, 2)
    ]
    rig.step(new=tuple(leaving), rows={1: 1})
    assert rig.made() == []
    rig.step(rows={2: 1})
    executor, _, decode = rig.made()
    assert (executor.attributes or {})[names.SLICE_TOKENS] == 2
    assert (decode.start_time, decode.end_time) == (20, 30)


def test_spans_carry_drafts_only_if_there_were_any(rig: Rig) -> None:
    rig.step(new=(new(1, "r", RECORDED), new(2, "r", RECORDED)), rows={1: 2, 2: 2})
    drafts = (VerifiedDraft(1, "ngram", 4, 3), VerifiedDraft(2, "grammar", 2, 0))
    rig.step(rows={1: 1, 2: 1}, drafts=drafts)
    rig.step(rows={1: 1, 2: 1}, drafts=(VerifiedDraft(9, "ngram", 5, 5), drafts[0]), ends=(1, 2))
    executor, *_ = rig.made()
    attributes = executor.attributes or {}
    assert attributes[names.SLICE_TOKENS] == 2 + 5 + 5
    assert (attributes[names.DRAFT_TOKENS], attributes[names.ACCEPTED_TOKENS]) == (10, 6)
    rig.step(new=(new(3, "s", RECORDED),), rows={3: 2}, ends=(3,))
    assert names.DRAFT_TOKENS not in (rig.made()[3].attributes or {})


def test_spans_name_only_the_kind_of_a_constraint(rig: Rig) -> None:
    made = new(1, "r", RECORDED)
    constraint = Constraint(regex="a secret")
    sampling = msgspec.structs.replace(made.sampling, constraint=constraint)
    rig.step(new=(msgspec.structs.replace(made, sampling=sampling),), rows={1: 2}, ends=(1,))
    executor, prefill, decode = rig.made()
    assert executor.attributes is not None
    assert executor.attributes[names.CONSTRAINT] == "regex"
    assert not any("secret" in str(span.attributes) for span in (executor, prefill, decode))


def test_a_preempted_and_resumed_sequence_has_two_slices(rig: Rig) -> None:
    rig.step(new=(new(1, "r", RECORDED),), rows={1: 2})
    rig.step(finished=(1,), new=(new(1, "r", RECORDED, generated=1),), rows={1: 3})
    rig.step(rows={1: 1}, ends=(1,))
    slices = [span for span in rig.made() if span.name == "executor"]
    assert [(span.attributes or {})[names.SLICE_TOKENS] for span in slices] == [1, 2]
    assert [event.name for event in slices[1].events] == [names.RESUMED, names.FIRST_TOKEN]


def test_a_new_epoch_ends_every_slice(rig: Rig) -> None:
    rig.step(new=(new(1, "r", RECORDED), new(2, "s", RECORDED)), rows={1: 2})
    rig.spans.clear()
    found = [((span.attributes or {})[names.REQUEST_ID], span.name) for span in rig.made()]
    assert found == [
        *(("r", name) for name in ("executor", "prefill", "decode")),
        *(("s", name) for name in ("executor", "prefill")),
    ]


def test_unsampled_requests_have_no_spans(rig: Rig) -> None:
    rig.step(new=(new(1, "r", NOT_RECORDED),), rows={1: 2})
    rig.step(rows={1: 1}, ends=(1,))
    rig.spans.clear()
    assert rig.made() == []


def draft(source: str, num_tokens: int, num_accepted: int) -> VerifiedDraft:
    return VerifiedDraft(1, source, num_tokens, num_accepted)


def taken(counts: DraftCounts) -> dict[str, list[int]]:
    """By source: drafts, their tokens, accepted ones, and these by position."""
    found: dict[str, list[int]] = {}
    for instrument, number, labels in counts.take():
        numbers = found.setdefault(labels[names.DRAFT_SOURCE], [])
        if len(numbers) < len(SUMS):
            assert instrument is SUMS[len(numbers)]
        else:
            assert instrument is instruments.ACCEPTED_TOKENS_PER_POS
            assert labels[names.DRAFT_POSITION] == str(len(numbers) - len(SUMS))
        numbers.append(number)
    return found


def test_counts_are_taken_once_per_source_and_position() -> None:
    counts = DraftCounts(("grammar", "suffix", "ngram"))
    counts.add([draft("ngram", 4, 4), draft("ngram", 4, 1), draft("grammar", 2, 0)])
    counts.add([draft("ngram", 3, 1)])
    assert taken(counts) == {
        "grammar": [1, 2, 0, 0],
        "suffix": [0, 0, 0, 0],
        "ngram": [3, 11, 6, 3, 1, 1, 1],
    }
    assert taken(counts) == {key: [0, 0, 0, 0] for key in ("grammar", "suffix", "ngram")}


def test_positions_add_up_to_the_accepted_tokens() -> None:
    counts = DraftCounts(("suffix",))
    counts.add([draft("suffix", 16, accepted) for accepted in range(17)])
    _, _, accepted, *accepted_at = taken(counts)["suffix"]
    assert sum(accepted_at) == accepted == sum(range(17))


def test_the_load_is_of_the_last_thousand() -> None:
    counts = DraftCounts(("suffix",))
    assert counts.load() == {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
    counts.add([draft("ngram", 8, 8)] * 500)
    assert counts.load() == {"drafts": 500, "draft_tokens": 4000, "accepted_tokens": 4000}
    counts.take()
    counts.add([draft("ngram", 2, 0)] * 1000)
    assert counts.load() == {"drafts": 1000, "draft_tokens": 2000, "accepted_tokens": 0}
