"""One case by its number."""

from __future__ import annotations

import random
from collections.abc import Callable

from . import bodies, messages
from .interfaces import INTERFACES, Interfaces
from .wire import Case

Maker = Callable[[random.Random, Interfaces], Case]

MAKERS: tuple[tuple[int, Maker], ...] = (
    (150, bodies.no_json),
    (5, bodies.too_much),
    (45, lambda rng, _: messages.bad_head(rng)),
    (50, messages.bad_length),
    (40, messages.bad_chunks),
    (25, messages.good_chunks),
    (35, messages.kinds_of_body),
    (25, messages.methods),
    (55, messages.named),
    (15, messages.slow),
    (15, messages.short_body),
    (340, bodies.fields_changed),
    (90, bodies.other_names),
    (30, bodies.names_twice),
    (35, messages.targets),
    (30, lambda rng, _: messages.by_id(rng)),
    (20, lambda rng, _: messages.pipelined(rng)),
    (10, lambda rng, _: messages.keyed(rng)),
)
"""Relative frequency of each kind of case, and the function that makes one."""


def case(seed: int, number: int) -> Case:
    """Return the case that these numbers alone decide."""
    rng = random.Random(f"{seed}:{number}")
    weights = [weight for weight, _ in MAKERS]
    ((_, make),) = rng.choices(MAKERS, weights)
    return make(rng, INTERFACES)
