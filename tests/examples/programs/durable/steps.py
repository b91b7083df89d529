"""Three long generations in a row, which the workflows of this folder make as their steps.

The programs run in environments that have a workflow engine and a client, and nothing of ours. With
`CRASH_AFTER` the process kills itself once the engine has decoded so many tokens.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from urllib.request import urlopen

URL = os.environ["NANO_INFERENCE_URL"] + "/v1"
METRICS_URL = os.environ["NANO_INFERENCE_METRICS_URL"]
WORKFLOW = os.environ["WORKFLOW_ID"]
STATE = Path(os.environ["STATE_FOLDER"])

STEPS = 3
TOKENS = int(os.environ["TOKENS"])
PROMPTS = [f"{number} + 25 =" for number in range(STEPS)]
LONG = {"ignore_eos": True}
"""The extra body that makes each generation as long as it may be."""


def decoded() -> int:
    """Return how many tokens the engine has decoded."""
    with urlopen(METRICS_URL) as answer:
        return sum(
            int(float(count))
            for count in re.findall(
                r"^nano_tokens_decoded_total\S* (\S+)", answer.read().decode(), re.M
            )
        )


def crash_in_the_middle() -> None:
    """Watch the engine, and kill this process in the middle of a generation, if it is to crash."""
    if after := int(os.environ.get("CRASH_AFTER", "0")):
        threading.Thread(target=_crash, args=(after,), daemon=True).start()


def _crash(after: int) -> None:
    while (count := decoded()) < after:
        time.sleep(0.005)
    (STATE / "crashed").write_text(str(count))
    os.kill(os.getpid(), signal.SIGKILL)


def done(texts: list[str]) -> None:
    """Write what the workflow has returned, and end."""
    print(json.dumps(texts), flush=True)
    os._exit(0)
