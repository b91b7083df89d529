"""One case by its number."""

from __future__ import annotations

import random
from collections.abc import Callable

from . import bodies, messages
from .wire import Case

MAX_BODY_BYTES = 2 << 20
HEAD_TIMEOUT_S = 2

Maker = Callable[[random.Random], Case]

# How often each comes, in all.
_MAKERS: tuple[tuple[int, Maker], ...] = (
    (340, bodies.fields_changed),
    (90, bodies.other_names),
    (30, bodies.names_twice),
    (150, bodies.no_json),
    (5, lambda rng: bodies.too_much(rng, MAX_BODY_BYTES)),
    (45, messages.bad_head),
    (50, messages.bad_length),
    (40, messages.bad_chunks),
    (25, messages.good_chunks),
    (35, messages.kinds_of_body),
    (35, messages.targets),
    (25, messages.methods),
    (55, messages.named),
    (15, messages.hosts),
    (30, messages.by_id),
    (20, messages.pipelined),
    (10, messages.keyed),
    (15, lambda rng: messages.slow(rng, HEAD_TIMEOUT_S)),
    (15, messages.short_body),
)


def case(seed: int, number: int) -> Case:
    """A case, which these two numbers alone decide."""
    rng = random.Random(f"{seed}:{number}")
    weights = [weight for weight, _ in _MAKERS]
    ((_, make),) = rng.choices(_MAKERS, weights)
    return make(rng)
