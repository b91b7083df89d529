"""Fixtures of buses, in memory and on Redis."""

from ..bus.conftest import *  # noqa: F403
