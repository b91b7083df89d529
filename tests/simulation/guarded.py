"""Defects that no simulation shows, each with the test that finds it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from nano_inference.stages.batching.paged import PagedKVCache

from ..stages.admission import test_epoch_core as epochs
from ..stages.batching import test_caches as caches
from ..stages.batching import test_core as batching
from ..stages.batching import test_states as states
from .planting import Defect

_EPOCHS = "stages/admission/epochs.py"
_REQUESTS = "stages/admission/requests.py"
_SNAPSHOTS = "stages/batching/parts/snapshots/part.py"

GUARDED: tuple[tuple[Defect, Callable[[], object]], ...] = (
    (
        Defect(
            "a shorter second drain is ignored",
            _EPOCHS,
            "self._drain_until_ns = min(self._drain_until_ns, until_ns)",
            "pass",
        ),
        epochs.test_a_shorter_drain_ends_it_sooner_and_a_longer_one_not_later,
    ),
    (
        Defect(
            "the end of a drain has no timer",
            _EPOCHS,
            "            wake_at.append(self._drain_until_ns)\n",
            "            pass\n",
        ),
        epochs.test_a_shorter_drain_ends_it_sooner_and_a_longer_one_not_later,
    ),
    (
        Defect(
            "missing replicas have no timer",
            _EPOCHS,
            "wake_at = [self._patience_ends_ns()]",
            "wake_at = [None]",
        ),
        epochs.test_the_lane_wakes_up_to_go_on_without_missing_replicas,
    ),
    (
        Defect(
            "resumed requests count twice", _EPOCHS, "self._replayed += 1", "self._replayed += 2"
        ),
        epochs.test_epochs_and_resumed_requests_are_counted,
    ),
    (
        Defect(
            "an end that is reported twice counts twice",
            _REQUESTS,
            "if self.ledger.remove(entry_key(entry_id, request_id)) is not None:",
            "if self.ledger.remove(entry_key(entry_id, request_id)) or True:",
        ),
        epochs.test_a_finished_request_is_acknowledged_and_counted_once,
    ),
    (
        Defect(
            "an entry is acknowledged twice",
            _REQUESTS,
            "self._outbox.add(do.Acknowledge(entry_id, request_id))",
            "self._outbox.add(*[do.Acknowledge(entry_id, request_id)] * 2)",
        ),
        epochs.test_a_finished_request_is_acknowledged_and_counted_once,
    ),
    (
        Defect(
            "a cancelled entry waits on for its tokens",
            _REQUESTS,
            "        self._outbox.add(do.StopWaiting(key))\n",
            "        pass\n",
        ),
        epochs.test_a_cancellation_ends_the_wait_of_a_long_prompt,
    ),
    (
        Defect(
            "ends in lost plans are lost",
            "stages/batching/core.py",
            "self._next.ended[:0] = [cancel for sent in self.sent for cancel in sent.plan.ended]",
            "pass",
        ),
        batching.test_ends_in_lost_plans_are_in_the_next_plan,
    ),
    (
        Defect(
            "room for free blocks of a prefix is not required",
            "stages/batching/cache.py",
            "self._require(num_fresh + sum(not self._ref_counts[block_id] for block_id in held))",
            "self._require(num_fresh)",
        ),
        partial(caches.test_free_blocks_of_a_prefix_count_as_needed, PagedKVCache),
    ),
    (
        Defect(
            "a snapshot of a row that was dropped is found",
            _SNAPSHOTS,
            "if seq.status is SequenceStatus.FINISHED or not self._is_shared(allocation):",
            "if not self._is_shared(allocation):",
        ),
        partial(states.test_a_sequence_that_has_ended_leaves_no_snapshot_of_a_dropped_row, "radix"),
    ),
    (
        Defect(
            "states that older weights began are found",
            _SNAPSHOTS,
            "        return self._cache.is_current(allocation)",
            "        return True",
        ),
        partial(states.test_states_that_older_weights_began_are_not_found, "weights", "paged"),
    ),
    (
        Defect(
            "states that an adapter's older version began are found",
            _SNAPSHOTS,
            "        return self._cache.is_current(allocation)",
            "        return True",
        ),
        partial(states.test_states_that_older_weights_began_are_not_found, "adapter", "radix"),
    ),
    (
        Defect(
            "a sequence waits for a snapshot that will not come",
            "stages/batching/parts/snapshots/prefills.py",
            "return prefill if prefill.is_expected or has_blocks else None",
            "return prefill",
        ),
        partial(states.test_no_sequence_waits_for_a_snapshot_that_will_not_come, "radix"),
    ),
)
