"""Keys in a cluster: each command's keys must be in one hash slot."""

from __future__ import annotations

import pytest
from redis.crc import key_slot

from nano_inference.bus.links import all_links
from nano_inference.config import BusConfig, ConfigError
from nano_inference.store.redis.keys import Keys

NAMES = ["nano", "a:b", "prefix with spaces", "é"]
IDS = ["r1", "1795185430038-0", "a{b}c", "{}", "}{", "a}b", "", "é", "\ud800"]


@pytest.mark.parametrize("prefix", NAMES)
@pytest.mark.parametrize("lane", ["0", "eu-1", "é"])
def test_each_family_is_in_one_slot(prefix: str, lane: str) -> None:
    keys = Keys(prefix, lane)
    families = {
        "leases": [keys.requests, keys.lanes],
        "results": [keys.results, keys.told("x", "1-0"), keys.told("", "")],
        "links": [keys.link(link.name) for link in all_links(3)],
    }
    for name, family in families.items():
        assert len({key_slot(key) for key in family}) == 1, name


def test_the_load_is_spread() -> None:
    keys = Keys("nano")
    outs = {key_slot(keys.out(f"r{i}")) for i in range(1000)}
    assert len(outs) > 900, "a stream of its own for each request"
    parts = [keys.requests, keys.results, keys.link("plans"), Keys("nano", "1").link("plans")]
    assert len({key_slot(key) for key in parts}) == len(parts)


def test_no_two_keys_are_the_same() -> None:
    keys = Keys("nano")
    made = [keys.out(each) for each in IDS] + [keys.own(each) for each in IDS]
    made += [keys.link(link.name) for link in all_links(12)]
    made += [keys.requests, keys.results, keys.dead, keys.lanes, keys.epoch, keys.stages]
    made += [
        keys.weights,
        *(keys.told(*each) for each in (("x", "1-0"), ("y", "1-0"), ("x", "1-1"))),
    ]
    assert len(set(made)) == len(made)


@pytest.mark.parametrize("setting", ["prefix", "lane"])
def test_names_can_not_move_keys(setting: str) -> None:
    with pytest.raises(ConfigError, match="braces"):
        BusConfig(**{setting: "a{b}"})  # type: ignore[arg-type]
