"""The base classes of messages between clients and a pipeline."""

from __future__ import annotations

import msgspec


class PublicOutput(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """A message read by clients; newer pipelines may add fields."""


class PublicPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message written by clients, or a part of one."""


class OutputPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message read by clients."""
