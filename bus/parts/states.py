"""Recurrent state: what layers keep of a sequence beside keys and values.

A snapshot is a copy of a sequence's state after some of its tokens. Snapshots have numbers, which
batching gives out as it does blocks, and their memory is in the executor.
"""

from __future__ import annotations

import msgspec

from ..sections import Section


class StateCapacity(Section, frozen=True):
    """In ReplicaCapacity: layers of the model have a recurrent state.

    Attributes:
        num_snapshots: Snapshots that the executor has memory for; their numbers count from 0.
        num_bytes: Bytes of one.
    """

    num_snapshots: int
    num_bytes: int


class StateStart(Section, frozen=True):
    """In NewSequence, with `num_cached` above 0: the state after these tokens is in a snapshot.

    A shared prefill, all of whose tokens are cached, has none: the state is copied from the row
    that it shares with.
    """

    snapshot: int


class StateSave(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot to be made.

    Attributes:
        seq_id: A sequence of the plan.
        num_tokens: Its state after so many leading tokens is saved, of which the step computes the
            last one.
        snapshot: The number.
    """

    seq_id: int
    num_tokens: int
    snapshot: int


class StatePlan(Section, frozen=True):
    """In StepPlan.

    Sequences that start read their snapshots before any of these is made. None is made of a row
    that the executor drops, since its sequence has ended.
    """

    saves: tuple[StateSave, ...]
