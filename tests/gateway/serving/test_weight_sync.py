"""Parts of an update change together; a part that fails changes nothing."""

from __future__ import annotations

import pytest

from nano_inference.bus.control import MemoryTag
from nano_inference.bus.weights import FolderWeights, GroupWeights
from nano_inference.config import BusError, WeightsError
from nano_inference.gateway.serving.weight_sync import VersionLabels, WeightSync, number_of

from ..fake import FakeEngine

PART = FolderWeights("a")
BOTH: tuple[MemoryTag, ...] = ("weights", "kv_cache")
BAD = WeightsError("it is torn")


class Sync(WeightSync):
    """On a fake engine."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine, self.labels = engine, VersionLabels()
        super().__init__(engine, self.labels, 5.0)


@pytest.fixture
def sync(engine: FakeEngine) -> Sync:
    return Sync(engine)


async def test_while_paused_parts_wait_for_each_other(sync: Sync) -> None:
    await sync.pause("retract")
    assert await sync.take(PART, "9") is None
    assert await sync.take(PART, None) is None
    assert sync.engine.version == 0
    assert await sync.resume() == 9
    assert sync.engine.names == [
        "pause",
        "stage_weights",
        "stage_weights",
        "update_weights",
        "resume",
    ]
    assert sync.engine.last("update_weights")["partial"]
    assert sync.labels.of(9) == "9"


async def test_otherwise_each_call_is_an_update(sync: Sync) -> None:
    assert await sync.take(PART, None) == 1
    assert await sync.take(PART, None, whole=True, abort=True) == 2
    assert sync.engine.names == ["update_weights", "update_weights"]
    assert sync.engine.last("update_weights") == {
        "weights": PART,
        "in_flight": "abort",
        "version": None,
        "partial": False,
    }


async def test_a_session_ends_while_generation_goes_on(sync: Sync) -> None:
    await sync.open()
    assert await sync.take(PART, None) is None
    assert await sync.close() == 1
    assert "resume" not in sync.engine.names


async def test_a_session_outlasts_a_pause(sync: Sync) -> None:
    """The order of miles: pause, begin, parts, end, continue."""
    await sync.pause("retract")
    await sync.open()
    await sync.take(PART, "1")
    assert await sync.close() == 1
    assert await sync.resume() is None
    assert sync.engine.names == ["pause", "stage_weights", "update_weights", "resume"]


async def test_a_pause_within_a_session_drops_nothing(sync: Sync) -> None:
    await sync.open()
    await sync.take(PART, None)
    assert await sync.pause("keep") == 0
    await sync.take(PART, None)
    assert await sync.resume() is None
    assert await sync.close() == 1


async def test_a_failed_part_changes_nothing(sync: Sync) -> None:
    await sync.pause("abort")
    await sync.take(PART, "5")
    sync.engine.failures["stage_weights"] = BAD
    with pytest.raises(WeightsError, match="torn"):
        await sync.take(PART, "5")
    del sync.engine.failures["stage_weights"]
    with pytest.raises(WeightsError, match="begin anew") as refused:
        await sync.take(PART, "5")
    assert refused.value.code == "weights_incomplete"
    with pytest.raises(WeightsError, match="are as they were"):
        await sync.resume()
    assert (sync.engine.version, sync.engine.names[-1], sync.paused) == (0, "resume", False)


async def test_a_failed_update_leaves_the_group(sync: Sync) -> None:
    await sync.pause("keep")
    sync.engine.failures["stage_weights"] = BAD
    with pytest.raises(WeightsError, match="torn"):
        await sync.take(PART, None)
    with pytest.raises(WeightsError, match="begin anew"):
        await sync.take(GroupWeights("g", ()), None)
    assert sync.engine.last("leave_weights_group") == {"group": "g"}


async def test_after_a_failure_the_next_update_works(sync: Sync) -> None:
    await sync.pause("keep")
    sync.engine.failures["stage_weights"] = BusError("a lane is silent")
    with pytest.raises(BusError):
        await sync.take(PART, None)
    sync.engine.failures.clear()
    assert await sync.pause("keep") == 0
    await sync.take(PART, None)
    assert await sync.resume() == 1


async def test_generation_goes_on_also_when_the_change_fails(sync: Sync) -> None:
    await sync.pause("keep")
    await sync.take(PART, None)
    sync.engine.failures["update_weights"] = BAD
    with pytest.raises(WeightsError):
        await sync.resume()
    assert sync.engine.names[-1] == "resume"
    sync.engine.failures.clear()
    assert await sync.resume() is None


async def test_parts_of_a_dead_trainer_are_dropped(sync: Sync) -> None:
    await sync.pause("keep")
    await sync.take(PART, "8")
    assert await sync.pause("keep") == 1
    await sync.take(PART, None)
    assert await sync.resume() == 1
    assert sync.engine.last("update_weights")["weights"].parts == 1


async def test_while_memory_is_released_parts_wait_for_each_other(sync: Sync) -> None:
    """They are put in place before the KV cache takes the room that they need till then."""
    assert await sync.release_memory(BOTH) == 0
    assert await sync.resume_memory(["weights"]) is None
    await sync.take(PART, None)
    await sync.take(PART, None, whole=True)
    assert await sync.resume_memory(["kv_cache"]) == 1
    assert not sync.released
    assert await sync.take(PART, None) == 2
    assert sync.engine.names == [
        "release_memory",
        "resume_memory",
        "stage_weights",
        "stage_weights",
        "update_weights",
        "resume_memory",
        "update_weights",
    ]


async def test_memory_within_a_pause_leaves_the_parts_to_it(sync: Sync) -> None:
    await sync.pause("keep")
    await sync.take(PART, None)
    assert await sync.release_memory(BOTH) == 0
    assert await sync.resume_memory(BOTH) is None
    assert sync.engine.version == 0
    assert await sync.resume() == 1


async def test_memory_comes_back_also_when_a_part_has_failed(sync: Sync) -> None:
    await sync.release_memory(BOTH)
    sync.engine.failures["stage_weights"] = BAD
    with pytest.raises(WeightsError, match="torn"):
        await sync.take(PART, None)
    with pytest.raises(WeightsError, match="are as they were"):
        await sync.resume_memory(BOTH)
    assert [given["tags"] for name, given in sync.engine.calls if name == "resume_memory"] == [
        ("weights",),
        ("kv_cache",),
    ]
    assert not sync.released


async def test_without_room_parts_wait_for_another_try(sync: Sync) -> None:
    await sync.release_memory(BOTH)
    await sync.take(PART, None)
    sync.engine.failures["resume_memory"] = BAD
    with pytest.raises(WeightsError):
        await sync.resume_memory(BOTH)
    assert sync.released == set(BOTH)
    sync.engine.failures.clear()
    assert await sync.resume_memory(BOTH) == 1


async def test_a_memory_release_drops_the_parts_of_a_dead_trainer(sync: Sync) -> None:
    await sync.release_memory(BOTH)
    await sync.take(PART, None)
    assert await sync.release_memory(BOTH) == 1
    assert await sync.resume_memory(BOTH) is None


async def test_a_pause_without_weights_changes_none(sync: Sync) -> None:
    await sync.pause("keep")
    assert await sync.resume() is None
    assert sync.engine.names == ["pause", "resume"]


async def test_abort_in_any_part_holds_for_all(sync: Sync) -> None:
    await sync.pause("keep")
    await sync.take(PART, None, abort=True)
    await sync.take(PART, None)
    await sync.resume()
    assert sync.engine.last("update_weights")["in_flight"] == "abort"


async def test_sessions_do_not_nest(sync: Sync) -> None:
    with pytest.raises(WeightsError, match="no weight update session"):
        await sync.close()
    await sync.open()
    with pytest.raises(WeightsError, match="open already"):
        await sync.open()


@pytest.mark.parametrize(("label", "version"), [("12", 12), ("4", 6), ("best", 6)])
async def test_a_label_becomes_the_version_or_stands_beside_it(
    sync: Sync, label: str, version: int
) -> None:
    sync.engine.version = 5
    assert await sync.take(PART, label) == version
    assert sync.labels.of(version) == label


async def test_the_version_in_place_can_be_renamed(sync: Sync) -> None:
    sync.engine.version = 5
    await sync.rename("final")
    assert sync.labels.of(5) == "final"


# --- labels of versions ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "present", "number"),
    [
        ("7", 3, 7),
        ("3", 3, None),
        ("2", 3, None),
        ("step-7", 3, None),
        ("", 3, None),
        (None, 3, None),
        ("\u0667", 3, None),
        ("-9", 3, None),
        ("9" * 30, 3, None),
    ],
)
def test_number_of(label: str | None, present: int, number: int | None) -> None:
    assert number_of(label, present) == number


def test_a_version_without_a_name_is_called_by_its_number() -> None:
    labels = VersionLabels()
    labels.put(2, "two")
    labels.put(3, "3")
    assert [labels.of(version) for version in (1, 2, 3)] == ["1", "two", "3"]
    labels.put(2, "2")
    assert labels.of(2) == "2"


def test_the_newest_names_are_kept() -> None:
    labels = VersionLabels()
    for version in range(1500):
        labels.put(version, f"v{version}")
    assert labels.of(1499) == "v1499"
    assert labels.of(500) == "v500"
    assert labels.of(499) == "499"
