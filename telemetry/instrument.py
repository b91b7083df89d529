"""What a metric is."""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["counter", "gauge", "histogram"]


class Instrument(msgspec.Struct, frozen=True):
    """One metric.

    Attributes:
        name: By OpenTelemetry's rules.
        kind: A counter only grows, a gauge is as it is now, a histogram counts values by size.
        unit: In UCUM.
        question: That it answers.
        attributes: By which it is split; see `names`.
        buckets: Upper ends of a histogram's buckets.
    """

    name: str
    kind: Kind
    unit: str
    question: str
    attributes: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


# From half a millisecond on, where a step of a small model is, to five minutes.
SECONDS: tuple[float, ...] = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 30, 60, 120, 300),
)
# Planning a step takes less than that, and no step takes minutes.
STEP_SECONDS: tuple[float, ...] = (0.00005, 0.0001, 0.0002, 0.0003, *SECONDS[:-4])
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024)
# The buckets that the conventions ask for.
TOKENS = tuple(float(4**power) for power in range(14))
