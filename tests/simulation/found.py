"""The stories that find the planted defects: seed, and the most requests."""

from __future__ import annotations

EVERY_DAY = (
    "a stage that starts begins no epoch",
    "the first token of a prompt is taken for computed",
    "a dispatched sequence costs no credit",
)
"""Defects that `make test` plants."""

FOUND: dict[str, tuple[int, int]] = {}
