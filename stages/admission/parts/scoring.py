"""A reference model, which scores each sample."""

from __future__ import annotations

from ....bus.parts.scoring import ReferenceScoring
from . import Part, Resolved


class Reference(Part):
    """Requests scores of each generated sample."""

    def opened(self, resolved: Resolved) -> ReferenceScoring | None:
        if resolved.pooling is not None:
            return None
        return ReferenceScoring(resolved.sampling.temperature)
