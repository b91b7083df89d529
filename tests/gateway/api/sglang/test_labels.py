"""Any text names a version; numbers are taken over while they rise."""

from __future__ import annotations

import pytest

from nano_inference.gateway.api.sglang.sync import VersionLabels, number_of


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
