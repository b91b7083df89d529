"""What became of drafts, as metrics and heartbeats tell it."""

from __future__ import annotations

from nano_inference.bus.messages import VerifiedDraft
from nano_inference.stages.executor.draft_counts import DraftCounts, SourceCounts


def draft(source: str, num_tokens: int, num_accepted: int) -> VerifiedDraft:
    return VerifiedDraft(1, source, num_tokens, num_accepted)


def test_each_source_is_told_once_with_its_positions() -> None:
    counts = DraftCounts(("grammar", "suffix", "ngram"))
    counts.add([draft("ngram", 4, 4), draft("ngram", 4, 1), draft("grammar", 2, 0)])
    counts.add([draft("ngram", 3, 1)])
    nothing = SourceCounts("suffix", 0, 0, 0, ())
    assert counts.take() == [
        SourceCounts("grammar", 1, 2, 0, ()),
        nothing,
        SourceCounts("ngram", 3, 11, 6, (3, 1, 1, 1)),
    ]
    assert [(each.source, each.drafts) for each in counts.take()] == [
        ("grammar", 0),
        ("suffix", 0),
        ("ngram", 0),
    ]


def test_positions_add_up_to_what_was_accepted() -> None:
    counts = DraftCounts(("suffix",))
    counts.add([draft("suffix", 16, accepted) for accepted in range(17)])
    (found,) = counts.take()
    assert sum(found.accepted_at) == found.accepted == sum(range(17))


def test_the_load_is_of_the_last_thousand() -> None:
    counts = DraftCounts(("suffix",))
    assert counts.load() == {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
    counts.add([draft("ngram", 8, 8)] * 500)
    assert counts.load() == {"drafts": 500, "draft_tokens": 4000, "accepted_tokens": 4000}
    counts.take()
    counts.add([draft("ngram", 2, 0)] * 1000)
    assert counts.load() == {"drafts": 1000, "draft_tokens": 2000, "accepted_tokens": 0}
