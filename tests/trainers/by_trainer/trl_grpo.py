"""TRL's GRPOTrainer in server mode: generation, importance sampling, and weights at each step.

Its client's transfer of weights takes CUDA, so two methods of the client are replaced: the same
calls, with the weights in a file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_client import VLLMClient

url, run, folder = sys.argv[1:]
updates = []


def init_communicator(self, device=0):
    assert self.get_server_info()["weight_transfer_config"] is not None
    assert self.get_world_size() == 1
    self._post(f"{self.base_url}/init_weight_transfer_engine", json={"init_info": {}})


def update_named_params(self, metadata, named_params):
    tensors = {name: tensor.detach().clone() for name, tensor in named_params}
    assert [*tensors] == [name for name, _, _ in metadata]
    path = Path(run) / f"step-{len(updates)}"
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    self._start_weight_update()
    self._post(f"{self.base_url}/update_weights", json={"update_info": {"path": str(path)}})
    self._finish_weight_update()
    updates.append(path)


VLLMClient.init_communicator = init_communicator
VLLMClient.update_named_params = update_named_params


def reward(completions, **_):
    """Return a reward for each completion: shorter ones are better."""
    return [-float(len(str(each))) for each in completions]


def main() -> None:
    prompts = [[{"role": "user", "content": f"{i} + {i} ="}] for i in range(8)]
    trainer = GRPOTrainer(
        model=folder,
        processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=[reward],
        args=GRPOConfig(
            output_dir=f"{run}/trl",
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=url,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            learning_rate=1e-4,
            max_steps=3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
    )
    trainer.train()
    assert trainer.state.global_step == 3
    assert len(updates) >= 2
    # The trainer's logprobs of its samples are the server's: it reports by how much they differ.
    name = "sampling/sampling_logp_difference/max"
    differences = [each[name] for each in trainer.state.log_history if name in each]
    assert differences, trainer.state.log_history[0].keys()
    assert max(differences) < 1e-3, differences
    print(json.dumps({"updates": len(updates), "differences": differences}))


if __name__ == "__main__":
    main()
