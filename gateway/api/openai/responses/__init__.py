"""`/v1/responses`: create, retrieve, list, cancel, delete; `/v1/conversations`."""

from __future__ import annotations

from .calls import ResponseCalls
from .conversations import ConversationCalls
from .requests import ID_PREFIX
from .socket import upgrade

__all__ = ["ID_PREFIX", "ConversationCalls", "ResponseCalls", "upgrade"]
