"""`/v1/responses`: create, retrieve, list, cancel, delete."""

from __future__ import annotations

from .calls import ResponseCalls
from .requests import ID_PREFIX

__all__ = ["ID_PREFIX", "ResponseCalls"]
