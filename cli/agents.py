"""Programs of others that `launch` starts, and how each is set to a server and a model.

In words, variables and files: `$url` is the server's address, `$api` that of OpenAI's interface,
`$model` the model, `$key` the key for the server, and `$folder` a folder of the program's own here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..config import API_KEY_VARIABLE


class Agent(NamedTuple):
    """A program.

    Attributes:
        install: The command that installs it.
        command: Its command line, before a user's own arguments.
        variables: Variables of its environment, beside the key's own.
        files: Files in `$folder`, by name.
    """

    install: str
    command: tuple[str, ...]
    variables: Mapping[str, str] = {}
    files: Mapping[str, str] = {}


_NAME = "nano-inference"
_OPENAI = {"OPENAI_BASE_URL": "$api", "OPENAI_API_BASE": "$api", "OPENAI_API_KEY": "$key"}
# Of LiteLLM: its table of prices comes with it.
_OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def _npm(package: str) -> str:
    return f"npm install -g {package}"


def _json(value: Any) -> str:
    return json.dumps(value, indent=1)


def _codex_settings(**settings: str) -> tuple[str, ...]:
    return tuple(
        word
        for name, value in settings.items()
        for word in ("-c", f'model_providers.{_NAME}.{name}="{value}"')
    )


_CODEX = _codex_settings(
    name=_NAME, base_url="$api", wire_api="responses", env_key=API_KEY_VARIABLE
)
_CLAUDE_SIZES = ("OPUS", "SONNET", "HAIKU")

AGENTS: Mapping[str, Agent] = {
    "codex": Agent(
        _npm("@openai/codex"),
        ("codex", "-c", f'model_provider="{_NAME}"', *_CODEX, "-m", "$model"),
    ),
    "claude": Agent(
        _npm("@anthropic-ai/claude-code"),
        ("claude",),
        {
            "ANTHROPIC_BASE_URL": "$url",
            "ANTHROPIC_AUTH_TOKEN": "$key",
            "ANTHROPIC_MODEL": "$model",
            **{f"ANTHROPIC_DEFAULT_{size}_MODEL": "$model" for size in _CLAUDE_SIZES},
            "CLAUDE_CODE_SUBAGENT_MODEL": "$model",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    "opencode": Agent(
        _npm("opencode-ai"),
        ("opencode",),
        {
            "OPENCODE_CONFIG_CONTENT": json.dumps(
                {
                    "model": f"{_NAME}/$model",
                    "small_model": f"{_NAME}/$model",
                    "provider": {
                        _NAME: {
                            "npm": "@ai-sdk/openai-compatible",
                            "options": {"baseURL": "$api", "apiKey": f"{{env:{API_KEY_VARIABLE}}}"},
                            "models": {"$model": {}},
                        }
                    },
                }
            ),
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        },
    ),
    "aider": Agent(
        "python -m pip install aider-chat",
        ("aider", "--model", "openai/$model", "--no-show-model-warnings"),
        _OPENAI | _OFFLINE,
    ),
    "qwen": Agent(
        _npm("@qwen-code/qwen-code"),
        ("qwen", "--auth-type", "openai"),
        _OPENAI | {"OPENAI_MODEL": "$model"},
    ),
    "pi": Agent(
        _npm("@earendil-works/pi-coding-agent"),
        ("pi", "--provider", _NAME, "--model", "$model"),
        {"PI_CODING_AGENT_DIR": "$folder"},
        {
            "models.json": _json(
                {
                    "providers": {
                        _NAME: {
                            "baseUrl": "$api",
                            "api": "openai-completions",
                            # pi reads the variable.
                            "apiKey": f"$${API_KEY_VARIABLE}",
                            "models": [{"id": "$model"}],
                        }
                    }
                }
            )
        },
    ),
    "cline": Agent(
        _npm("cline"),
        ("cline",),
        {"CLINE_DATA_DIR": "$folder"},
        {
            "settings/providers.json": _json(
                {
                    "version": 1,
                    "lastUsedProvider": "openai-compatible",
                    "modes": {},
                    "providers": {
                        "openai-compatible": {
                            "settings": {
                                "provider": "openai-compatible",
                                "apiKey": "$key",
                                "model": "$model",
                                "baseUrl": "$api",
                            },
                            "updatedAt": "2026-01-01T00:00:00.000Z",
                            "tokenSource": "manual",
                        }
                    },
                }
            )
        },
    ),
    "continue": Agent(
        _npm("@continuedev/cli"),
        ("cn", "--config", "$folder/config.yaml"),
        {},
        {
            "config.yaml": _json(
                {
                    "name": _NAME,
                    "version": "1.0.0",
                    "schema": "v1",
                    "models": [
                        {
                            "name": "$model",
                            "provider": "openai",
                            "model": "$model",
                            "apiBase": "$api",
                            "apiKey": f"$${{{{ secrets.{API_KEY_VARIABLE} }}}}",
                            "roles": ["chat"],
                            "capabilities": ["tool_use"],
                        }
                    ],
                }
            )
        },
    ),
    "mini": Agent(
        "python -m pip install mini-swe-agent",
        (
            "mini",
            "-m",
            "openai/$model",
            "-c",
            "mini.yaml",
            "-c",
            "model.cost_tracking=ignore_errors",
        ),
        _OPENAI | _OFFLINE | {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"},
    ),
}
