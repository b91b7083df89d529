"""The program `llm`, with models that a file tells it of, as its users do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import given
from promises import URL, cancels, keep, promise

# Its name for each interface, and what it says of it in the file.
INTERFACES = {"chats": "", "responses": "responses: true"}
FILE = "".join(
    f"""
- model_id: {name}
  model_name: {model}
  api_base: {URL}/v1
  supports_schema: true
  supports_tools: true
  {more}
"""
    for model, suffix in ((given.MODEL, ""), ("none", "-of-none"))
    for name, more in ((name + suffix, more) for name, more in INTERFACES.items())
)
GREEDY = ("-o", "temperature", "0")
TOOL = '''
def get_weather(city: str) -> str:
    """Get the weather in a city"""
    return \'{"sky": "sunny", "degrees": 21}\'
'''
NUMBERS = {
    "type": "object",
    "properties": {"numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 1000}},
    "required": ["numbers"],
}

folder = Path(tempfile.mkdtemp())
(folder / "extra-openai-models.yaml").write_text(FILE)


def started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [Path(sys.executable).with_name("llm"), *arguments],
        env=os.environ | {"LLM_USER_PATH": str(folder), "OPENAI_API_KEY": "none"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Ctrl-C is ignored in what a shell starts in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def llm(*arguments: str, status: int = 0) -> str:
    """Return the output of `llm`; for an error its sentence."""
    with started(*arguments) as ran:
        printed, said = ran.communicate()
    assert ran.returncode == status, printed + said
    return said if status else printed


@promise
def answer_has_text_and_usage() -> None:
    for interface in INTERFACES:
        assert llm("-m", interface, "--no-stream", *GREEDY, given.SUM).strip() == given.TOTAL
        (logged,) = json.loads(llm("logs", "--json", "-n", "1"))
        assert logged["input_tokens"] > 0
        assert logged["output_tokens"] > 0


@promise
def stream_and_conversation() -> None:
    for interface in INTERFACES:
        assert llm("-m", interface, *GREEDY, given.SUM).strip() == given.TOTAL
        assert llm("--continue", given.SUM).strip()


@promise
def answer_keeps_its_schema() -> None:
    for interface in INTERFACES:
        person = json.loads(
            llm("-m", interface, "--schema", "name, age int, chef bool", given.PERSON)
        )
        # The schema that it makes of this allows other fields.
        kinds = {key: type(value) for key, value in person.items()}
        assert kinds.items() >= {"name": str, "age": int, "chef": bool}.items(), person


@promise
def tool_is_called_and_its_result_taken() -> None:
    for interface in INTERFACES:
        tools = ("--functions", TOOL, "--tools-debug")
        with started("-m", interface, *tools, *GREEDY, given.FORECAST) as ran:
            printed, said = ran.communicate()
        assert ran.returncode == 0, said
        assert "Tool call: get_weather({'city': 'Oslo'})" in said
        assert printed.strip()


@promise
def errors_are_a_sentence() -> None:
    for interface in INTERFACES:
        said = llm("-m", interface, given.TOO_LONG, status=1)
        assert "Error:" in said
        assert str(given.CONTEXT_LENGTH) in said
        assert "Traceback" not in said
        assert given.MODEL in llm("-m", f"{interface}-of-none", given.SUM, status=1)


@promise
def interrupted_program_cancels_its_request() -> None:
    for interface in INTERFACES:
        with (
            cancels(),
            started("-m", interface, "--schema", json.dumps(NUMBERS), given.SUM) as running,
        ):
            assert running.stdout is not None
            assert running.stdout.read(1)
            running.send_signal(signal.SIGINT)
            running.communicate()


keep()
