"""TRL's AsyncGRPOTrainer: rollouts in a process of their own, weights through files.

Its own transfer of weights takes CUDA; it takes any object with the same methods in its place, and
this one writes the weights and has the server read them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import requests
import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

url, run, folder = sys.argv[1:]

# The trainer reads the device's name, for the speed of which it has a table.
torch.cuda.get_device_name = lambda device=None: "cpu"


def attention(query, key, value, starts_q, starts_k, most_q, most_k, softmax_scale, **_):
    """Return what FlashAttention's kernel returns, for segments of a packed batch.

    Args:
        query, key, value: `[tokens, heads, size]`.
        starts_q, starts_k: Where the segments begin, and the end of the last one.
    """
    groups = query.shape[1] // key.shape[1]
    found = []
    for place in range(len(starts_q) - 1):
        q = query[starts_q[place] : starts_q[place + 1]].transpose(0, 1)
        k, v = (
            each[starts_k[place] : starts_k[place + 1]].transpose(0, 1).repeat_interleave(groups, 0)
            for each in (key, value)
        )
        rows, columns = q.shape[1], k.shape[1]
        mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        made = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=softmax_scale
        )
        found.append(made.transpose(0, 1))
    return torch.cat(found)


# Its attention over a tree of samples is a kernel for CUDA, which this package downloads.
sys.modules["kernels"] = SimpleNamespace(
    get_kernel=lambda *_, **__: SimpleNamespace(flash_attn_varlen_func=attention)
)


def reward(completions: list[object], **_: object) -> list[float]:
    """Return a reward for each completion: shorter ones are better."""
    return [-float(len(str(each))) for each in completions]


class ThroughFiles:
    """A `WeightTransferProtocol`: weights as a folder of safetensors."""

    def __init__(self) -> None:
        self.versions = 0

    def init_weight_transfer(self) -> None:
        requests.get(f"{url}/health", timeout=60).raise_for_status()

    def pause(self) -> None:
        self._post("/pause_generation", {"mode": "in_place"})

    def send_weights(self, iterator: object) -> None:
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in iterator}
        self.versions += 1
        path = Path(run) / f"weights-{self.versions}"
        path.mkdir()
        save_file(tensors, path / "model.safetensors")
        self._post("/update_weights_from_disk", {"model_path": str(path)})

    def resume(self) -> None:
        self._post("/continue_generation", {})

    def destroy(self) -> None:
        pass

    def _post(self, path: str, body: dict) -> None:
        answer = requests.post(url + path, json=body, timeout=120)
        assert answer.status_code == 200, answer.text


def main() -> None:
    prompts = [[{"role": "user", "content": f"{i} + {i} ="}] for i in range(8)]
    transfer = ThroughFiles()
    trainer = AsyncGRPOTrainer(
        model=folder,
        processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=[reward],
        args=AsyncGRPOConfig(
            output_dir=f"{run}/trl",
            vllm_server_base_url=url,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            max_steps=2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        weight_transfer=transfer,
    )
    trainer.train()
    assert trainer.state.global_step == 2
    assert transfer.versions >= 2
    print(json.dumps({"versions": transfer.versions}))


if __name__ == "__main__":
    main()
