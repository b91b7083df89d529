"""The smallest call of each interface."""

from __future__ import annotations

from typing import Any

CHAT = {"messages": [{"role": "user", "content": "a"}]}
STREAMED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "a"},
    "/v1/messages": CHAT | {"max_tokens": 4},
    "/inference/v1/generate": {"token_ids": [5]},
    "/generate": {"text": "a"},
    "/api/chat": CHAT,
    "/api/generate": {"prompt": "a"},
}
"""Calls that may be streams, by path."""
BODIES: dict[str, dict[str, Any]] = STREAMED | {
    "/v1/embeddings": {"input": "a"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/encode": {"text": "a"},
    "/api/embed": {"input": "a"},
    "/api/embeddings": {"prompt": "a"},
    "/v2/models/tiny/generate": {"text_input": "a"},
}
