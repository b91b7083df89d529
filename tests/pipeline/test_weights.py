"""Weights that change while tokens flow: every token has its true version, and no KV is stale."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import pytest
import safetensors.torch
from torch import Tensor

from nano_inference import Completion, Pipeline, WeightsError
from nano_inference.bus import open_bus
from nano_inference.bus import weights as handoff
from nano_inference.bus.control import Pause
from nano_inference.bus.weights import FolderWeights, InFlight, LocalWeights, StagedWeights
from nano_inference.config import BusError
from nano_inference.pipeline import client, client_weights
from nano_inference.stages.executor.core import ExecutorCore
from nano_inference.stages.executor.runner.weights.sync_manager import WeightSyncManager

from .. import oracle
from ..oracle import announcing, token_of
from .builders import (
    DTYPE,
    State,
    begun,
    break_once,
    check_purity,
    check_stamps,
    error_code,
    find_pure_logprob,
    greedy,
    in_halves,
    raises,
    until_batched,
    versions_of,
    whole_stream,
    whole_streams,
)
from .conftest import MakeConfig, both_buses

SHORT_MODEL = True
# Below the time after which a client gives an answer up.
ANSWERED_S = client_weights.ANSWER_S - 5
Spell = Callable[[Mapping[str, Tensor], int], State]


@pytest.fixture(scope="module")
def pure_logprob(loaded: State) -> float:
    return find_pure_logprob(loaded, DTYPE)


async def under_load(
    pipeline: Pipeline,
    loaded: State,
    spell: Spell,
    in_flight: InFlight,
    updates: int,
    check: Callable[[Completion], int],
    after_each: Callable[[int], None] = lambda version: None,
) -> int:
    """Updates in a row while eight clients send one request after the other.

    Returns how many requests saw more than one version.
    """
    dice = random.Random(7)
    done = asyncio.Event()
    mixed = 0

    async def client(number: int) -> None:
        nonlocal mixed
        while not done.is_set():
            request = greedy(number, dice.randrange(1, 40), n=1 + number % 2)
            mixed += check(await pipeline.complete(request)) > 1
            number += 8

    async with asyncio.TaskGroup() as clients:
        await pipeline.client.update_weights(spell(loaded, 1), in_flight="retract")
        for number in range(8):
            clients.create_task(client(number))
        for version in range(2, updates + 1):
            new = spell(loaded, version)
            assert await pipeline.client.update_weights(new, in_flight=in_flight) == version
            after_each(version)
            await asyncio.sleep(dice.random() * 0.01)
        done.set()
    assert not handoff._LAID_DOWN
    return mixed


@both_buses()
async def test_each_token_is_stamped_with_the_weights_that_made_it(
    running: Pipeline, loaded: State
) -> None:
    """Not with those in place at admission, or when the request ended."""
    assert await under_load(running, loaded, oracle.announcing, "keep", 8, check_stamps)


@pytest.mark.parametrize("in_flight", ["keep", "retract"])
async def test_no_kv_is_stale_after_an_update(
    running: Pipeline, loaded: State, pure_logprob: float, in_flight: InFlight
) -> None:
    """Prefixes of older weights are not found; retracted sequences are computed again."""

    def check(completion: Completion) -> int:
        return check_purity(completion, pure_logprob, whole=in_flight == "retract")

    assert await under_load(running, loaded, oracle.remembering, in_flight, 8, check)


async def test_kept_kv_is_of_both_versions(
    running: Pipeline, loaded: State, pure_logprob: float
) -> None:
    """The oracle can tell: a sequence that goes on over an update rests on both versions' KV."""
    await running.client.update_weights(oracle.remembering(loaded, 1))
    request = await begun(running.client, greedy(0, 200))
    await running.client.update_weights(oracle.remembering(loaded, 2))
    (sample,) = (await request).samples
    assert len(sample.weight_versions) == 2
    assert not oracle.is_pure(sample.logprobs[sample.weight_versions[1][1]], pure_logprob)


async def test_weights_change_while_paused(running: Pipeline, loaded: State) -> None:
    """The blocking way: pause, sync, resume."""
    await running.client.update_weights(oracle.announcing(loaded, 1))
    request = await begun(running.client, greedy(0, 200))
    await running.client.pause()
    assert await running.client.update_weights(oracle.announcing(loaded, 2)) == 2
    assert await running.client.weight_version() == 2
    assert not request.done()
    await running.client.resume()
    completion = await request
    check_stamps(completion)
    assert versions_of(completion)[-1] == 2


@both_buses()
async def test_a_pause_that_is_called_off_is_answered(exact: Pipeline) -> None:
    """By a client that resumes before the steps under way are done."""
    streams = asyncio.create_task(whole_streams(exact))
    for _ in range(20):
        async with asyncio.timeout(ANSWERED_S):
            await asyncio.gather(exact.client.pause(), exact.client.resume())
    async with asyncio.timeout(ANSWERED_S):
        await exact.client.resume()
    await streams


@both_buses()
async def test_a_pause_can_wait_for_what_runs(exact: Pipeline) -> None:
    """Later requests wait for its end, whether they come before or after it is answered."""
    first = await begun(exact.client, greedy(0, 200))
    pausing = asyncio.create_task(exact.client.pause("wait"))
    later = [asyncio.create_task(exact.client.complete(greedy(n, 8))) for n in range(1, 5)]
    await pausing
    assert len((await first).samples[0].token_ids) == 200
    later.append(asyncio.create_task(exact.client.complete(greedy(5, 8))))
    await exact.client.weight_version()
    assert not later[-1].done()
    await exact.client.resume()
    assert all(each.status == "done" for each in await asyncio.gather(*later))


async def test_aborted_requests_return_partial_samples(exact: Pipeline) -> None:
    running_requests = [await begun(exact.client, greedy(n, 1500)) for n in range(4)]
    await exact.client.pause("abort")
    for completion in await asyncio.gather(*running_requests):
        assert completion.status == "cancelled"
        assert error_code(completion) == "aborted"
        (sample,) = completion.samples
        assert sample.finish_reason == "abort"
        assert len(sample.token_ids) == len(sample.logprobs) > 0
    await exact.client.resume()
    await whole_stream(exact, 0)


async def test_an_unknown_in_flight_mode_is_refused(running: Pipeline, loaded: State) -> None:
    client, unknown = running.client, cast(InFlight, "finish")
    for attempt in (
        client.pause(unknown),
        client.update_weights(loaded, in_flight=unknown),
        client._operate("batching", Pause(unknown)),
    ):
        with pytest.raises(WeightsError, match=r"in_flight.*'keep' or 'retract' or 'abort'"):
            await attempt
    assert versions_of(await running.complete(greedy(0, 3))) == [0] * 3


async def test_the_caller_chooses_the_version(running: Pipeline, loaded: State) -> None:
    assert await running.client.update_weights(oracle.announcing(loaded, 70), version=70) == 70
    assert versions_of(await running.complete(greedy(0, 3))) == [70] * 3
    for stale in (70, 3, -1, 0):
        with raises("weights_refused", "not above", kind=WeightsError):
            await running.client.update_weights(oracle.announcing(loaded, 3), version=stale)
    assert await running.client.update_weights(oracle.announcing(loaded, 71)) == 71


async def test_weights_that_are_no_numbers_are_refused(running: Pipeline, loaded: State) -> None:
    """Also numbers that overflow in the model's dtype."""
    await running.client.update_weights(oracle.announcing(loaded, 1))
    broken = [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")]
    broken += ["model.layers.0.self_attn.v_proj.bias", "model.norm.weight"]
    request = asyncio.create_task(running.complete(greedy(0, 200)))
    for bad in (math.nan, math.inf, -math.inf, 1e39):
        new = oracle.announcing(loaded, 2)
        for name in broken:
            new[name] = new[name].double()
            new[name].view(-1)[-1] = bad
        for source, partial in ((new, False), ({broken[0]: new[broken[0]]}, True)):
            with raises("weights_not_finite", re.escape(broken[0]), kind=WeightsError):
                await running.client.update_weights(source, partial=partial)
    assert set(versions_of(await request)) == {1}
    assert check_stamps(await running.complete(greedy(1, 5))) == 1
    assert await running.client.update_weights(oracle.announcing(loaded, 2)) == 2


@both_buses("redis-links")
async def test_a_failed_executor_reports_the_lost_update(
    exact: Pipeline, loaded: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The restarted executor has the weights of model_path, and reports that with every token."""
    await exact.client.update_weights(oracle.announcing(loaded, 1))
    break_once(monkeypatch, ExecutorCore, "execute", after=1)
    with raises("weights_interrupted", kind=WeightsError):
        await exact.client.update_weights(oracle.announcing(loaded, 2))
    await whole_stream(exact, 3)
    assert await exact.client.weight_version() == 0
    # 1 has been, and was something else.
    assert await exact.client.update_weights(oracle.announcing(loaded, 2)) == 2
    assert check_stamps(await exact.complete(greedy(0, 5))) == 1


@both_buses()
async def test_an_unanswered_update_is_an_error(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a pipeline an operation ends with an error, within its time."""
    monkeypatch.setattr(client_weights, "ANSWER_S", 0.2)
    bus = open_bus(make_config().bus)
    try:
        with raises("no_answer", kind=BusError):
            await client.BusClient(bus).update_weights(FolderWeights("/new"), timeout_s=0.1)
    finally:
        await bus.aclose()


# --- weights that are lost -------------------------------------------------------------------


def fail_midway(patch: pytest.MonkeyPatch) -> None:
    original = WeightSyncManager._write

    def write(self: WeightSyncManager, new_weights: Mapping[str, Tensor]) -> None:
        original(self, dict(list(new_weights.items())[:5]))
        raise RuntimeError("the device is gone")

    patch.setattr(WeightSyncManager, "_write", write)


@both_buses()
async def test_lost_weights_generate_nothing_until_all_have_come(
    running: Pipeline, loaded: dict[str, Tensor]
) -> None:
    client = running.client
    await client.update_weights(oracle.announcing(loaded, 1))
    request = await begun(client, greedy(0, 300))
    executor = running._actors["executor"]
    with pytest.MonkeyPatch.context() as patch:
        fail_midway(patch)
        with raises("weights_lost", "the device is gone", kind=WeightsError):
            await client.update_weights(oracle.announcing(loaded, 2))
    await until_batched(running, 1, "waiting")
    assert executor.load()["lacks"] == "weights"
    assert "weights_lost" in await client.deployment.trouble()
    new = oracle.announcing(loaded, 2)
    with raises("weights_incomplete", kind=WeightsError):
        await client.update_weights({"model.norm.weight": new["model.norm.weight"]}, partial=True)
    assert not request.done()
    assert await client.update_weights(new) == 2
    completion = await request
    assert check_stamps(completion) == 2
    assert set(versions_of(completion)) == {1, 2}
    assert "weights_lost" not in executor.load()
    assert running._actors["executor"] is executor, "it was not started anew"


# --- parts -----------------------------------------------------------------------------------


REQUEST = {"prompt_token_ids": [20, 21], "sampling": {"temperature": 0, "max_tokens": 2}}


@pytest.fixture
def halves(pipeline: Pipeline, tmp_path: Path) -> tuple[FolderWeights, FolderWeights]:
    """Weights that spell version 1, in two folders."""
    file = pipeline.config.engine.model_folder / "model.safetensors"
    first, second = in_halves(announcing(safetensors.torch.load_file(file), 1), tmp_path)
    return FolderWeights(str(first)), FolderWeights(str(second))


async def tokens(pipeline: Pipeline) -> tuple[int, ...]:
    return (await pipeline.complete(REQUEST)).samples[0].token_ids


@both_buses("redis-links")
async def test_all_parts_make_a_version(
    pipeline: Pipeline, halves: tuple[FolderWeights, FolderWeights]
) -> None:
    client, before = pipeline.client, await tokens(pipeline)
    for half in halves:
        await client.stage_weights("u", half)
        assert (await tokens(pipeline), await client.weight_version()) == (before, 0)
    assert await client.update_weights(StagedWeights("u", 2), partial=True) == 1
    assert await tokens(pipeline) == (token_of(1),) * 2


async def test_with_a_part_missing_nothing_changes(
    pipeline: Pipeline, halves: tuple[FolderWeights, FolderWeights], tmp_path: Path
) -> None:
    client, before = pipeline.client, await tokens(pipeline)
    await client.stage_weights("u", halves[0])
    with pytest.raises(WeightsError):
        await client.stage_weights("u", FolderWeights(str(tmp_path / "none")))
    await client.stage_weights("u", halves[1])
    with raises("weights_incomplete", kind=WeightsError):
        await client.update_weights(StagedWeights("u", 2), partial=True)
    assert (await tokens(pipeline), await client.weight_version()) == (before, 0)


async def test_a_state_dict_is_no_part(pipeline: Pipeline) -> None:
    with pytest.raises(WeightsError, match="all tensors at once"):
        await pipeline.client.stage_weights("u", LocalWeights("x"))
