"""An update that is decided before any executor changes: whoever is killed, all or none change."""

from __future__ import annotations

import pytest
import torch

from nano_inference.bus.control import FinishUpdate, UpdateWeights
from nano_inference.bus.weights import StagedWeights
from nano_inference.config import WeightsError
from nano_inference.stages.executor.changes.core import WeightParts

from ....errors import raises
from .world import World, place

OLD, NEW = {"a": 0.0, "b": 0.0}, {"a": 7.0, "b": 7.0}
PREPARE = UpdateWeights(place(7, "ab"), prepare_as="p", decided=True, timeout_s=60.0)


def prepared() -> World:
    """An executor that has checked the weights."""
    world = World()
    name = world.ask(PREPARE)
    world.rest()
    assert world.answers[name].error is None
    return world


def error_of(world: World, name: str) -> str:
    error = world.answers[name].error
    return error.code if error is not None else ""


@pytest.mark.parametrize(("decision", "values"), [(4, NEW), (0, OLD)])
def test_without_a_word_the_decision_is_read(decision: int, values: dict[str, float]) -> None:
    """The gateway was killed before, or after, it wrote the decision."""
    world = prepared()
    world.wait(61)
    assert world.unread == ["p"]
    assert world.core.prepared == "p"
    world.decide("p", decision)
    world.rest()
    assert (world.core.version, world.model.values()) == (decision, values)
    assert not world.core.prepared
    assert world.core.next_deadline_ns() is None


def test_an_unknown_decision_is_read_again() -> None:
    world = prepared()
    world.wait(61)
    world.decide("p", None)
    assert world.core.prepared == "p"
    world.wait(3)
    assert world.unread == ["p", "p"]
    # The gateway that comes back is not too late.
    name = world.ask(FinishUpdate("p", 2))
    world.rest()
    assert error_of(world, name) == ""
    world.decide("p", 0)
    world.rest()
    assert world.model.values() == NEW


def test_a_repeated_call_is_answered_as_the_first() -> None:
    world, finish = prepared(), FinishUpdate("p", 3)
    again = world.ask(PREPARE)
    assert error_of(world, again) == ""
    first = world.ask(finish)
    second = world.ask(finish)
    # It is on its way.
    assert error_of(world, second) == "weights_busy"
    world.rest()
    third = world.ask(finish)
    assert (error_of(world, first), error_of(world, third)) == ("", "")
    assert world.answers[third].version == 3
    assert error_of(world, world.ask(FinishUpdate("p", 4))) == "weights_incomplete"
    assert world.model.values() == NEW


def test_a_restarted_executor_completes_it_from_the_log() -> None:
    world = prepared()
    world.logs, world.logged = True, {"run/digest": {"a": 7.0, "b": 7.0}}
    world.restart()
    name = world.ask(FinishUpdate("p", 5, "run/digest"))
    world.rest()
    assert error_of(world, name) == ""
    assert (world.core.version, world.model.values()) == (5, NEW)
    again = world.ask(FinishUpdate("p", 5, "run/digest"))
    assert error_of(world, again) == ""


def test_without_the_weights_it_says_so_and_keeps_the_old() -> None:
    world = prepared()
    world.restart()
    name = world.ask(FinishUpdate("p", 5, "run/digest"))
    assert error_of(world, name) == "weights_incomplete"
    world.logs = True
    world.restart()
    name = world.ask(FinishUpdate("p", 5, "run/digest"))
    world.rest()
    assert error_of(world, name) == "weights_incomplete"
    assert (world.core.version, world.model.values()) == (0, OLD)


def test_a_part_that_comes_again_replaces_the_first() -> None:
    """Its gateway was killed before it counted the part."""
    parts, old, new = WeightParts(), torch.zeros(2), torch.ones(2)
    parts.add("u", {"a": old}, number=0)
    parts.add("u", {"a": new}, number=0)
    parts.add("u", {"b": old}, number=1)
    tensors, _, _ = parts.take(StagedWeights("u", 2))
    assert tensors["a"] is new
    parts.add("u", {"a": new}, number=1)
    with raises("weights_incomplete", kind=WeightsError):
        parts.take(StagedWeights("u", 1))
