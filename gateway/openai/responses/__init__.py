"""`/v1/responses`: create, and what becomes of a response afterwards."""

from __future__ import annotations

from .calls import ResponseCalls

__all__ = ["ResponseCalls"]
