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


def _launched(
    name: str, package: str, *arguments: str, files: Mapping[str, str] | None = None, **own: str
) -> Program:
    """A program that `nano-inference launch` starts.

    Args:
        arguments: Its own, with which it needs no terminal.
        files: As of `Program`.
        own: Variables of its environment.
    """
    command = ["nano-inference", "launch", name, "--url", "$url", "--model", MODEL, "--"]
    registry: Literal["npm", "pip"] = "pip" if "==" in package else "npm"
    return Program(registry, [package], [*command, *arguments], own, files or {}, launch=name)


# Its turns are programs of their own; the later ones read what the first one wrote.
_AIDER_TURNS = (
    f"for turn in 1 2 3; do nano-inference launch aider --url $url --model {MODEL} -- "
    "--edit-format diff --no-git --yes-always --no-check-update --analytics-disable "
    '--restore-chat-history --message "$$1" "$$2" || exit; done\n'
)

PROGRAMS = {
    "codex": _launched(
        "codex",
        "@openai/codex@0.171.0",
        *("exec", "--skip-git-repo-check", "--json", "--dangerously-bypass-approvals-and-sandbox"),
        "$prompt",
        CODEX_HOME="$folder/home",
    ),
    "claude": _launched(
        "claude",
        "@anthropic-ai/claude-code@2.1.332",
        *("-p", "$prompt", "--output-format", "json", "--dangerously-skip-permissions"),
        # Otherwise it refuses to run as root without asking.
        IS_SANDBOX="1",
    ),
    "opencode": _launched(
        "opencode",
        "opencode-ai@1.18.33",
        *("run", "$prompt"),
        files={"opencode.json": _json({"permission": {"*": "allow"}})},
        OPENCODE_DISABLE_AUTOUPDATE="1",
    ),
    "pi": _launched("pi", "@earendil-works/pi-coding-agent@1.6.0", "-p", "$prompt"),
    "qwen": _launched("qwen", "@qwen-code/qwen-code@0.24.4", "-p", "$prompt", "--yolo"),
    "continue": _launched(
        "continue",
        "@continuedev/cli@1.5.47",
        *("-p", "$prompt", "--auto"),
        CONTINUE_TELEMETRY_ENABLED="0",
    ),
    "cline": _launched("cline", "cline@3.0.65", "$prompt"),
    "aider": Program(
        "pip",
        ["aider-chat==0.86.2"],
        ["bash", "$folder/turns.sh", "$prompt", "$folder/note.txt"],
        files={"turns.sh": _AIDER_TURNS},
        launch="aider",
    ),
    "mini": _launched("mini", "mini-swe-agent==2.4.6", "-t", "$prompt", "-y", "--exit-immediately"),
    "openai-agents-js": _in_node("openai_agents.mjs", "@openai/agents@0.20.0", "zod@4.6.7"),
    "ai-openai": _in_node("ai.mjs", "@ai-sdk/openai@4.0.118", "ai@7.0.173", "zod@4.6.7"),
    "ai-openai-compatible": _in_node(
        "ai.mjs", "@ai-sdk/openai-compatible@3.0.92", "ai@7.0.173", "zod@4.6.7"
    ),
    "ai-anthropic": _in_node("ai.mjs", "@ai-sdk/anthropic@4.0.105", "ai@7.0.173", "zod@4.6.7"),
    # The version of n8n's node for OpenAI's chat models.
    "langchain-js": _in_node(
        "langchain.mjs", "@langchain/openai@1.4.4", "langchain@1.5.14", "zod@4.6.7"
    ),
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
