"""Log lines about KV tiers, for the batching stage and the engine for Python callers."""

from __future__ import annotations

from ..bus.control import TiersChanged
from ..config.logger import get_logger


def log_differences(changes: TiersChanged) -> None:
    """Log audited blocks whose bits differ."""
    for block in changes.audited:
        if block.loaded != block.computed:
            get_logger().error(
                "kv_tier_different",
                brief="a KV block from a tier differs from the computed one; the tiers are off "
                "until the cache is flushed",
                block=block.name.hex(),
                loaded=block.loaded,
                computed=block.computed,
            )
