"""Rendering of chat templates, and the process that does it under a time limit.

`TemplateWorkers` runs this file as a program with the descriptors of some connections. The program
loads Transformers once and forks a worker for each connection. A template that takes too much CPU
time ends its worker by SIGPROF, even within C code; the program reports that and forks another one.
The limit is CPU time so that a busy machine refuses no conversation. Requests and answers are JSON.

A template that came with its call is the caller's program. Its text is limited, and its worker ends
after it, since Transformers keeps compiled templates, and their constants, for ever.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

_SPARE_BYTES = 1 << 30
"""Address space that a worker may add to the program's."""

_MOST_CHARS = 1 << 24
"""Characters that a call's own template may write."""

_RENEWED = 3
"""Exit status of a worker in whose place another one is forked."""


def render_template(call: dict[str, Any]) -> dict[str, Any]:
    """Render a conversation.

    Args:
        call: `template`, `own` (whether it is the model's), and the arguments of
            `chat_template.render`.

    Returns:
        `text`; or `refused`, why the template refuses the conversation; or `failed`, another error.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    # Many templates write None where they should skip it.
    messages = [
        {name: value for name, value in message.items() if value is not None}
        for message in call["messages"]
    ]
    try:
        if not messages:
            raise ValueError("there is no message")
        rendered: Any = render_jinja_template(
            conversations=[messages],
            tools=call["tools"],
            chat_template=call["template"],
            add_generation_prompt=call["add_generation_prompt"],
            continue_final_message=call["continue_final_message"],
            **call["variables"],
        )
    # Templates refuse by TemplateError, and fail as any program does.
    except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        return {"refused": str(error)}
    except Exception as error:  # noqa: BLE001  (any error of a program from elsewhere)
        return {"failed": str(error) or type(error).__name__}
    (text,), _ = rendered
    if not call["own"] and len(text) > _MOST_CHARS:
        return {"failed": f"it writes more than {_MOST_CHARS} characters"}
    return {"text": str(text)}


def _fork_worker(connection: Connection, connections: list[Connection]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        # Copies of other connections would keep them open after their worker's end.
        for other in connections:
            if other is not connection:
                other.close()
        while True:
            call = json.loads(connection.recv_bytes())
            signal.setitimer(signal.ITIMER_PROF, call["limit_s"])
            found = render_template(call)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(json.dumps(found).encode())
            if not call["own"]:
                os._exit(_RENEWED)
    except (EOFError, OSError):
        os._exit(0)
    finally:
        os._exit(1)


def main() -> None:
    """Keep a worker at each connection until all connections are closed."""
    import transformers.utils.chat_template_utils  # noqa: F401  (the workers share it)

    connections = [Connection(int(descriptor)) for descriptor in sys.argv[1:]]
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + _SPARE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    workers = {_fork_worker(each, connections): each for each in connections}
    while workers:
        pid, status = os.wait()
        connection = workers.pop(pid)
        if os.WIFSIGNALED(status):
            answer = {"signal": os.WTERMSIG(status)}
            connection.send_bytes(json.dumps(answer).encode())
        if os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == _RENEWED:
            workers[_fork_worker(connection, connections)] = connection


if __name__ == "__main__":
    main()
