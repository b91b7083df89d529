"""The progress of loading weights, by Transformers' bars."""

from __future__ import annotations

from transformers.utils.logging import tqdm

from nano_inference.stages.executor.runner.progress import counted_progress, loaded_share


def test_the_share_follows_the_bar_of_transformers() -> None:
    assert loaded_share() is None
    with counted_progress():
        assert loaded_share() == 0
        shares = [loaded_share() for _ in tqdm({1: "a", 2: "b"}.items(), desc="Loading weights")]
    assert shares == [0, 0.5]
    assert loaded_share() is None
