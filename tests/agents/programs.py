"""The programs that are tried: their versions, and how each is started without a terminal.

In commands, variables and files, `$url` is the gateway's address, `$folder` an empty folder of the
run, `$prompt` what is asked for, and `$here` the folder of our own programs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any, Literal

HERE = Path(__file__).parent / "by_library"
MODEL = "scripted"
NODE = ["node@24.21.0"]
"""An interpreter of its own: most programs need a newer one than systems have."""


@dataclass(frozen=True)
class Program:
    """A program of others.

    Attributes:
        registry: Where its packages come from.
        packages: With the versions that are tried; the first is the program itself.
        command: Its command line.
        variables: Variables of its environment.
        files: Files in its folder, by path.
        probes: Beginnings of calls that may fail, such as "GET /favicon".
        script: Our own program that uses its packages; "" if it is a program itself.
        launch: Its name for `nano-inference launch`, which has the command's beginning.
    """

    registry: Literal["npm", "pip"]
    packages: list[str]
    command: list[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    probes: tuple[str, ...] = ()
    script: str = ""
    launch: str = ""

    @property
    def version(self) -> str:
        return self.packages[0].replace("==", "@").rpartition("@")[2]

    @property
    def package(self) -> str:
        return self.packages[0].replace("==", "@").rpartition("@")[0]

    @property
    def start(self) -> str:
        """Command of a program, or file of a library's program."""
        return self.script or f"nano-inference launch {self.launch}"

    def filled(self, text: str, **values: str) -> str:
        """Return a text of it with the run's values."""
        return Template(text).substitute(here=str(HERE), model=MODEL, **values)


def _json(value: Any) -> str:
    return json.dumps(value, indent=1)


_CODEX_PROVIDER = '{name="here",base_url="$url/v1",wire_api="responses"}'

# Of litellm: its table of prices comes with it.
_OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def _tool(name: str, *parameters: str) -> dict[str, Any]:
    properties = {each: {"type": "string"} for each in parameters}
    schema = {"type": "object", "properties": properties, "required": [*parameters]}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def _evaluated() -> str:
    """Settings of Promptfoo: three tests, each a turn."""
    provider = {
        "apiBaseUrl": "$url/v1",
        "apiKey": "none",
        "tools": [_tool("write_file", "path", "content"), _tool("read_file", "path")],
        "functionToolCallbacks": {
            "write_file": "file://promptfoo.cjs:writeFile",
            "read_file": "file://promptfoo.cjs:readFile",
        },
    }
    wanted = ["written", "walnut", "The tool returned: walnut"]
    tests = [
        {
            "vars": {"wish": "$prompt", "path": "$folder/note.txt", "turn": turn},
            "assert": [{"type": "contains", "value": text}],
        }
        for turn, text in enumerate(wanted)
    ]
    return _json(
        {
            "prompts": ["file://promptfoo.cjs:prompt"],
            "providers": [{"id": f"openai:chat:{MODEL}", "config": provider}],
            "tests": tests,
        }
    )


def _in_python(script: str, *packages: str) -> Program:
    """A program of our own with a library of Python."""
    variables = {"OPENAI_BASE_URL": "$url/v1", "OPENAI_API_KEY": "none", **_OFFLINE}
    return Program(
        "pip",
        [*packages],
        ["python", f"$here/{script}", "$url", "$prompt"],
        variables,
        script=script,
    )


def _in_node(script: str, *packages: str) -> Program:
    """A program of our own with libraries of Node, beside which it is put."""
    command = ["node", f"$folder/{script}", "$url", "$prompt", packages[0].rpartition("@")[0]]
    variables = {"OPENAI_BASE_URL": "$url/v1", "OPENAI_API_KEY": "none"}
    return Program("npm", [*packages], command, variables, script=script)


PROGRAMS = {
    "codex": Program(
        "npm",
        ["@openai/codex@0.171.0"],
        [
            *("codex", "exec", "--skip-git-repo-check", "--json"),
            *("--dangerously-bypass-approvals-and-sandbox", "-m", MODEL),
            *("-c", "model_provider=here", "-c", f"model_providers.here={_CODEX_PROVIDER}"),
            "$prompt",
        ],
        {"CODEX_HOME": "$folder/home"},
    ),
    "claude": Program(
        "npm",
        ["@anthropic-ai/claude-code@2.1.332"],
        [
            *("claude", "-p", "$prompt", "--output-format", "json"),
            "--dangerously-skip-permissions",
        ],
        {
            "ANTHROPIC_BASE_URL": "$url",
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            # Otherwise it refuses to run as root without asking.
            "IS_SANDBOX": "1",
        },
    ),
    "opencode": Program(
        "npm",
        ["opencode-ai@1.18.33"],
        ["opencode", "run", "-m", f"here/{MODEL}", "$prompt"],
        {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
        {
            "opencode.json": _json(
                {
                    "provider": {
                        "here": {
                            "npm": "@ai-sdk/openai-compatible",
                            "options": {"baseURL": "$url/v1", "apiKey": "none"},
                            "models": {MODEL: {}},
                        }
                    },
                    "permission": {"*": "allow"},
                }
            )
        },
    ),
    "pi": Program(
        "npm",
        ["@earendil-works/pi-coding-agent@1.6.0"],
        ["pi", "--provider", "here", "--model", MODEL, "-p", "$prompt"],
        {},
        {
            "home/.pi/agent/models.json": _json(
                {
                    "providers": {
                        "here": {
                            "baseUrl": "$url/v1",
                            "api": "openai-completions",
                            "apiKey": "none",
                            "models": [{"id": MODEL}],
                        }
                    }
                }
            )
        },
    ),
    "qwen": Program(
        "npm",
        ["@qwen-code/qwen-code@0.24.4"],
        ["qwen", "-p", "$prompt", "--yolo", "--auth-type", "openai"],
        {
            "OPENAI_BASE_URL": "$url/v1",
            "OPENAI_API_KEY": "none",
            "OPENAI_MODEL": MODEL,
        },
    ),
    "continue": Program(
        "npm",
        ["@continuedev/cli@1.5.47"],
        ["cn", "-p", "$prompt", "--config", "$folder/config.yaml", "--auto"],
        {"CONTINUE_TELEMETRY_ENABLED": "0"},
        {
            "config.yaml": _json(
                {
                    "name": "here",
                    "version": "1.0.0",
                    "schema": "v1",
                    "models": [
                        {
                            "name": MODEL,
                            "provider": "openai",
                            "model": MODEL,
                            "apiBase": "$url/v1",
                            "apiKey": "none",
                            "roles": ["chat"],
                            "capabilities": ["tool_use"],
                        }
                    ],
                }
            )
        },
    ),
    "cline": Program(
        "npm",
        ["cline@3.0.65"],
        ["cline", "$prompt"],
        {},
        {
            "home/.cline/data/settings/providers.json": _json(
                {
                    "version": 1,
                    "lastUsedProvider": "openai-compatible",
                    "modes": {},
                    "providers": {
                        "openai-compatible": {
                            "settings": {
                                "provider": "openai-compatible",
                                "apiKey": "none",
                                "model": MODEL,
                                "baseUrl": "$url/v1",
                            },
                            "updatedAt": "2026-01-01T00:00:00.000Z",
                            "tokenSource": "manual",
                        }
                    },
                }
            )
        },
    ),
    "aider": Program(
        "pip",
        ["aider-chat==0.86.2"],
        # Its turns are programs of their own; the later ones read what the first one wrote.
        ["bash", "$folder/turns.sh", "$prompt", "$folder/note.txt"],
        _OFFLINE | {"OPENAI_API_BASE": "$url/v1", "OPENAI_API_KEY": "none"},
        {
            "turns.sh": f"for turn in 1 2 3; do aider --model openai/{MODEL} --edit-format diff "
            "--no-git --yes-always --no-check-update --no-show-model-warnings --analytics-disable "
            '--restore-chat-history --message "$$1" "$$2" || exit; done\n'
        },
    ),
    "mini": Program(
        "pip",
        ["mini-swe-agent==2.4.6"],
        [
            *("mini", "-m", f"openai/{MODEL}", "-t", "$prompt", "-y", "--exit-immediately"),
            *("-c", "mini.yaml", "-c", "model.cost_tracking=ignore_errors"),
        ],
        {
            "OPENAI_API_BASE": "$url/v1",
            "OPENAI_API_KEY": "none",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            **_OFFLINE,
        },
    ),
    "openai-agents-js": _in_node("openai_agents.mjs", "@openai/agents@0.20.0", "zod@4.6.7"),
    "ai-openai": _in_node("ai.mjs", "@ai-sdk/openai@4.0.118", "ai@7.0.173", "zod@4.6.7"),
    "ai-openai-compatible": _in_node(
        "ai.mjs", "@ai-sdk/openai-compatible@3.0.92", "ai@7.0.173", "zod@4.6.7"
    ),
    "ai-anthropic": _in_node("ai.mjs", "@ai-sdk/anthropic@4.0.105", "ai@7.0.173", "zod@4.6.7"),
    "openai-agents": _in_python("openai_agents.py", "openai-agents==0.24.0"),
    "langgraph": _in_python(
        "langgraph_agent.py", "langgraph==1.2.24", "langchain==1.5.2", "langchain-openai==1.7.3"
    ),
    "litellm": _in_python("litellm_proxy.py", "litellm[proxy]==1.105.0", "openai==2.54.0"),
    "crewai": _in_python("crewai_agent.py", "crewai==1.15.30", "litellm==1.105.0"),
    "google-adk": _in_python("google_adk.py", "google-adk==2.13.0", "litellm==1.105.0"),
    "strands": _in_python("strands_agent.py", "strands-agents[openai]==1.62.0"),
    "haystack": _in_python("haystack_agent.py", "haystack-ai==3.4.1"),
    "dspy": _in_python("dspy_agent.py", "dspy==3.4.1"),
    "instructor": _in_python("instructor_turns.py", "instructor==1.17.0", "openai==3.3.0"),
    "outlines": _in_python("outlines_turns.py", "outlines[openai]==1.3.3", "openai"),
    "promptfoo": Program(
        "npm",
        ["promptfoo@0.123.1"],
        [
            *("promptfoo", "eval", "-c", "promptfooconfig.json", "-j", "1", "--no-cache"),
            *("--no-progress-bar", "--no-write", "--table-cell-max-length", "999"),
        ],
        {
            "PROMPTFOO_DISABLE_TELEMETRY": "1",
            "PROMPTFOO_DISABLE_UPDATE": "1",
            "PROMPTFOO_SELF_HOSTED": "1",
        },
        {"promptfooconfig.json": _evaluated()},
        script="promptfoo.cjs",
    ),
    "ollama-python": Program(
        "pip",
        ["ollama==0.6.3"],
        ["python", "$here/ollama_chat.py", "$url", "$prompt"],
        script="ollama_chat.py",
    ),
    "ollama-js": _in_node("ollama_chat.mjs", "ollama@0.6.4"),
}
