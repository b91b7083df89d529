"""`/v1/responses`: create, and what becomes of a response afterwards."""

from __future__ import annotations

from .calls import ResponseCalls
from .requests import ID_PREFIX

__all__ = ["ID_PREFIX", "ResponseCalls"]
