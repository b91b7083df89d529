"""Versions of LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterable

from ....bus.parts.adapters import AdaptersResult
from ..samples import Sample
from ..step import Step
from . import Part


class AdapterVersions(Part):
    """Sets the version of the adapter that has computed a sample's tokens."""

    reads = AdaptersResult

    def read(self, section: AdaptersResult, step: Step) -> Iterable[Sample]:
        for seq_id, version in zip(step.result.seq_ids, section.versions, strict=True):
            if (sample := step.find(seq_id)) is not None:
                sample.set_adapter(version)
        return ()
