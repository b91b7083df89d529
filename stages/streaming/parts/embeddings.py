"""Embeddings: a prompt's vector, with which its sample ends."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator

from ....bus.parts.embeddings import PooledResult
from ..samples import Sample
from ..step import Step
from . import Part


class Embeddings(Part):
    """Sets vectors of prompts."""

    reads = PooledResult

    def read(self, section: PooledResult, step: Step) -> Iterator[Sample]:
        for pooled in section.prompts:
            if (sample := step.find(pooled.seq_id)) is None:
                continue
            vector = array("f", pooled.vector)
            if sys.byteorder == "big":
                vector.byteswap()
            sample.fields["embedding"] = tuple(vector)
            sample.weight_versions = [(step.result.weight_version, 0)]
            sample.set_adapter(pooled.adapter_version)
            sample.finish_reason = "stop"
            request, end_ns = sample.request, step.result.end_ns
            request.step_end_ns = request.first_step_end_ns = end_ns
            yield sample
