"""Tokens and logprobs have the same bits whether a sequence's KV and recurrent state were computed,
or come from the device, host memory, disk or another executor."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nano_inference import EngineConfig, InferenceEngine, Pipeline
from nano_inference.bus.parts.states import StateSave
from nano_inference.bus.steps import AUDIT_SEQ_ID
from nano_inference.stages.batching.core import BatchingCore
from nano_inference.stages.batching.parts.snapshots import part as snapshots_part
from nano_inference.stages.batching.parts.tiers.part import Tiers
from nano_inference.stages.batching.parts.tiers.tiers import TierCounts
from nano_inference.stages.executor.core import ExecutorCore
from nano_inference.stages.executor.driver.trial import trial_step
from nano_inference.stages.executor.runner.tiers.host_slots import HostSlots

from ..soaking import in_soak
from . import hybrid_model
from .builders import break_once
from .conftest import MakeConfig
from .test_kv_tiers import GREEDY, PROMPTS, bits_of, prompts_of, wait_for_writes
from .test_replicas import batching_of, check_at_rest
from .test_roles import answers, bodies, with_roles

SETTINGS: dict[str, Any] = {
    "deterministic": True,
    "dtype": "float32",
    "kv_audit_every": 1,
    "max_model_len": 128,
    "max_batch_size": 4,
    "kv_cache_bytes": 400_000,
    # Four snapshots, one for each sequence of a batch: half of the hits are from below.
    "state_snapshots_bytes": 16_000,
}


def engine(**settings: Any) -> InferenceEngine:
    return InferenceEngine(
        EngineConfig(model_path=str(hybrid_model.folder()), **SETTINGS | settings)
    )


def counts(batching: BatchingCore) -> TierCounts:
    states = batching.part(Tiers).states
    assert states is not None
    return states.units.take_counts()


@pytest.fixture(scope="module")
def computed() -> Iterator[list[tuple[Any, ...]]]:
    """Without snapshots, so that each prompt is computed."""
    with engine(state_snapshots_bytes=0) as made:
        yield bits_of(made.generate(PROMPTS, GREEDY))


def test_the_step_that_measures_the_time_of_a_token_runs() -> None:
    """Its result is fixed in these tests, so that loading pays on any machine."""
    with engine() as made:
        runner = made._core.state.runner
        with runner.active():
            assert len(trial_step(runner)(64, 1)) == 64
        assert len(made.generate(PROMPTS[:1], GREEDY)) == 1


@pytest.mark.parametrize("cache_type", ["radix", in_soak("paged")])
def test_bits_are_the_same_from_host_memory(
    cache_type: str, computed: list[tuple[Any, ...]]
) -> None:
    with engine(cache_type=cache_type, kv_host_bytes=1 << 20) as made:
        for _ in range(3):
            assert bits_of(made.generate(PROMPTS, GREEDY)) == computed
        found = counts(made._batching)
        hits = made._batching.take_counts()["states"]["hits"]
    assert hits == 2 * len(PROMPTS)
    assert found.loaded > 8
    assert (found.audited > 4, found.different) == (True, 0)


def test_bits_are_the_same_from_disk_after_a_restart(
    tmp_path: Path, computed: list[tuple[Any, ...]]
) -> None:
    tiers = {"kv_disk_path": str(tmp_path), "kv_host_bytes": 1 << 20}
    with engine(**tiers) as made:
        made.generate([*PROMPTS, *prompts_of(1)], GREEDY)
        wait_for_writes(made)
    with engine(**tiers) as made:
        assert bits_of(made.generate(PROMPTS, GREEDY)) == computed
        found = counts(made._batching)
        hits = made._batching.take_counts()["states"]["hits"]
    assert hits == found.fetched == len(PROMPTS)
    assert (found.lost, found.different) == (0, 0)


KILLED = """
import json, os, signal, sys
from nano_inference import EngineConfig, InferenceEngine, SamplingParams

settings, prompts = json.load(sys.stdin)
made = InferenceEngine(EngineConfig(**settings))
made.generate(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
made._tiers.blocks.on_disk()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.soak(only=True)
def test_bits_are_the_same_from_disk_after_a_kill(
    tmp_path: Path, computed: list[tuple[Any, ...]]
) -> None:
    """Snapshots that wait for a rest to be written are lost with the process."""
    tiers = {"kv_disk_path": str(tmp_path), "kv_host_bytes": 1 << 20}
    settings = {"model_path": str(hybrid_model.folder()), **SETTINGS, **tiers}
    asked = json.dumps((settings, [*PROMPTS, *prompts_of(1)]))
    program = [sys.executable, "-c", KILLED]
    killed = subprocess.run(program, input=asked, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    with engine(**tiers) as made:
        assert bits_of(made.generate(PROMPTS, GREEDY)) == computed
        found = counts(made._batching)
    assert (found.fetched > 0, found.lost, found.different) == (True, 0, 0)


def late(patch: pytest.MonkeyPatch) -> None:
    """A snapshot is of one token more than its block's end, where the step computes one."""

    def save(seq_id: int, num_tokens: int, snapshot: int) -> StateSave:
        return StateSave(seq_id, num_tokens + (seq_id != AUDIT_SEQ_ID), snapshot)

    patch.setattr(snapshots_part, "StateSave", save)


def without_a_layer(patch: pytest.MonkeyPatch) -> None:
    """One layer's convolution window is left out when a snapshot is loaded."""
    parts_of = HostSlots._parts

    def parts(slots: HostSlots) -> Iterator[Any]:
        found = [*parts_of(slots)]
        is_state = len({units.shape[1] for units, _ in found}) > 1
        return iter(found[1:] if is_state else found)

    load = HostSlots.load

    def load_less(slots: HostSlots, moves: Any) -> None:
        with pytest.MonkeyPatch.context() as during:
            during.setattr(HostSlots, "_parts", parts)
            load(slots, moves)

    patch.setattr(HostSlots, "load", load_less)


@pytest.mark.parametrize("plant", [late, without_a_layer])
def test_the_audit_finds_a_planted_defect_and_turns_the_tiers_off(
    plant: Callable[[pytest.MonkeyPatch], None], computed: list[tuple[Any, ...]]
) -> None:
    with pytest.MonkeyPatch.context() as patch, engine(kv_host_bytes=1 << 20) as made:
        plant(patch)
        for some in (PROMPTS, PROMPTS, PROMPTS[:1], PROMPTS[:1]):
            made.generate(some, GREEDY)
        assert counts(made._batching).different
        patch.undo()
        made.flush_cache()
        for _ in range(2):
            assert bits_of(made.generate(PROMPTS, GREEDY)) == computed
        found = counts(made._batching)
    assert (found.loaded > 0, found.different) == (True, 0)


def with_snapshots(make_config: MakeConfig, **settings: Any) -> Any:
    return with_roles(
        make_config,
        engine__model_path=str(hybrid_model.folder()),
        engine__dtype="float32",
        engine__kv_host_bytes=1 << 20,
        **settings,
    )


async def test_a_handed_over_sequence_has_the_same_bits(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a failure of batching or an executor."""
    asked = bodies(5)
    config = make_config(
        engine__model_path=str(hybrid_model.folder()),
        engine__dtype="float32",
        engine__deterministic=True,
        engine__state_snapshots_bytes=0,
    )
    async with Pipeline(config) as alone:
        expected = await answers(alone, asked)
    async with Pipeline(with_snapshots(make_config)) as pipeline:
        for _ in range(2):
            assert await answers(pipeline, asked) == expected
        given, taken = (counts(batching_of(pipeline, replica)) for replica in range(2))
        for owner, method in ((BatchingCore, "absorb"), (ExecutorCore, "execute")):
            with monkeypatch.context() as patch:
                break_once(patch, owner, method, after=3)
                assert await answers(pipeline, asked) == expected
        await check_at_rest(pipeline)
    assert 0 < taken.received <= given.offered
    assert (taken.lost, taken.different) == (0, 0)
