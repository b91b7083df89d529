"""Codex's catalogue of models, which it reads from `/v1/models` beside OpenAI's list."""

from __future__ import annotations

from typing import Any

from ...call import Call
from ...server.http import JsonResponse, Response

_INSTRUCTIONS = """\
You are a coding agent in a terminal, on the user's machine. Work on the user's task until it is \
done: read the files that matter, change files by commands, and check the result. Follow the \
AGENTS.md files of the folders that you work in. Leave changes alone that you did not make. Ask \
before you delete or publish anything. At the end say in a few sentences what you did and what you \
found.
"""
"""Codex has its own only for models that it knows, and takes none without."""

_TOOL_OUTPUT_SHARE = 8
_MOST_TOOL_OUTPUT_TOKENS = 10_000


def models_response(call: Call, cards: list[dict[str, Any]]) -> Response:
    """Return the list of models; for Codex, which names its version, with its catalogue."""
    listed: dict[str, Any] = {"object": "list", "data": cards}
    if "client_version" in call.query:
        listed["models"] = [_entry(card, place) for place, card in enumerate(cards)]
    return JsonResponse(listed)


def _entry(card: dict[str, Any], place: int) -> dict[str, Any]:
    """Return a model in Codex's form.

    Args:
        place: In the list, by which Codex sorts.
    """
    length = card["max_model_len"]
    return {
        "slug": card["id"],
        "display_name": card["id"],
        "description": None,
        "base_instructions": _INSTRUCTIONS,
        "context_window": length,
        # Of a tool's output, the rest of which Codex leaves out.
        "truncation_policy": {
            "mode": "tokens",
            "limit": min(_MOST_TOOL_OUTPUT_TOKENS, length // _TOOL_OUTPUT_SHARE),
        },
        "input_modalities": ["text"],
        "shell_type": "unified_exec",
        "supports_parallel_tool_calls": True,
        "supported_reasoning_levels": [],
        "support_verbosity": False,
        "experimental_supported_tools": [],
        "visibility": "list",
        "supported_in_api": True,
        "priority": place,
    }
