"""No token trees of sessions."""

from __future__ import annotations

from typing import ClassVar

from ....bus.control import ReplicaCapacity
from ....bus.public import GenerateRequest
from ....config import RequestError
from . import Part


class NoTrees(Part):
    """Refuses turns of sessions, where no token trees are kept."""

    fields: ClassVar = ("session",)

    def check(self, request: GenerateRequest, capacity: ReplicaCapacity) -> None:
        """Raises RequestError: token_trees_off."""
        raise RequestError(
            "the request names a session, and this pipeline keeps no token trees; set "
            "bus.trees_max_bytes, or leave session out",
            code="token_trees_off",
        )
