"""Virtual environments for programs of others, and the versions that are tried."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "examples"
LIMIT_S = 600
INSTALL_LIMIT_S = 1800

# What each program of docs/examples takes that we do not.
PACKAGES = {
    "langchain_chat.py": ["langchain-openai==1.7.3"],
    "langchain_tools.py": ["langchain-openai==1.7.3"],
    "litellm_chat.py": ["litellm==1.105.0"],
    "openai_agents.py": ["openai-agents==0.24.0"],
    "lm_eval.sh": ["lm-eval[api]==0.4.13"],
    "inspect_ai.sh": ["inspect-ai==0.3.285", "openai"],
    "aiperf.sh": ["aiperf==0.13.0"],
    "guidellm.sh": ["guidellm==0.8.1", "torch"],
}
FOR_NODE = "openai@6.49.0"


def environment(name: str, cache: Path) -> Path:
    """The folder of the programs of an environment in which an example runs.

    Args:
        name: Of the example.
        cache: Where it is kept, until what it takes is another.
    """
    # Of what we take as well, the version that we are tested with.
    tested = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    packages = [f"{each}=={tested[each]}" if each in tested else each for each in PACKAGES[name]]
    key = hashlib.sha256("\n".join([sys.version, sys.executable, *packages]).encode()).hexdigest()
    kind = Path(name).stem
    folder = cache / f"{kind}-{key[:12]}"
    done = folder / ".installed"
    if not done.exists():
        for other in cache.glob(f"{kind}-*"):
            shutil.rmtree(other)
        venv.create(folder, with_pip=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip"]
        run([*pip, "install", "--quiet", *packages], folder, limit_s=INSTALL_LIMIT_S)
        done.touch()
    return folder / "bin"


def run(command: list[str], folder: Path, *, limit_s: float = LIMIT_S, **variables: str) -> str:
    """What a program prints that ends well.

    Args:
        folder: Its working directory.
        limit_s: When it is given up.
        variables: Of its environment, over those of ours.
    """
    ran = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def run_example(name: str, url: str, programs: Path, results: Path) -> str:
    """What a script of docs/examples prints that leaves its results in a folder.

    Args:
        url: Of the server that it asks.
        programs: The folder of the programs that it calls.
        results: The folder, in which its caches are as well.
    """
    return run(
        ["bash", str(FOLDER / name), str(results)],
        results,
        NANO_INFERENCE_URL=url,
        PATH=f"{programs}{os.pathsep}{os.environ['PATH']}",
        HOME=str(results),
        HF_HOME=str(results / "huggingface"),
    )
