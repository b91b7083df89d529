"""SkyRL's Tinker server with an external engine: samples of the model and of a checkpoint.

The server starts a training engine by uv, which a CPU without a network has not; its client of
the external engine and its database of futures are its own.
"""

from __future__ import annotations

import asyncio
import io
import json
import sys
import tarfile
import typing
from pathlib import Path
from types import SimpleNamespace

import torch
import typing_extensions
from safetensors.torch import save

# Pydantic reads no TypedDict of typing before Python 3.12, and SkyRL's types have some.
typing.TypedDict = typing_extensions.TypedDict

from skyrl.tinker import types
from skyrl.tinker.api import SampleRequest
from skyrl.tinker.config import EngineConfig
from skyrl.tinker.db_models import FutureDB, RequestStatus
from skyrl.tinker.extra import ExternalInferenceClient
from sqlalchemy.ext.asyncio import create_async_engine
from sqlmodel import SQLModel
from sqlmodel.ext.asyncio.session import AsyncSession

url, run, folder = sys.argv[1:]
PROMPT = [28, 27, 267, 224, 21, 24, 268]


def write_checkpoint(path: Path) -> None:
    """Write an adapter as SkyRL's engine does, as an archive."""
    hidden = json.loads((Path(folder) / "config.json").read_text())["hidden_size"]
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{layer}.lora_A.weight": torch.ones(4, hidden),
        f"{layer}.lora_B.weight": torch.ones(hidden, 4),
    }
    described = {"peft_type": "LORA", "r": 4, "lora_alpha": 64, "target_modules": ["q_proj"]}
    path.parent.mkdir(parents=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, data in {
            "adapter_config.json": json.dumps(described).encode(),
            "adapter_model.safetensors": save(tensors),
        }.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


async def main() -> None:
    database = create_async_engine(f"sqlite+aiosqlite:///{run}/futures.db")
    async with database.begin() as connection:
        await connection.run_sync(SQLModel.metadata.create_all)
    checkpoints = Path(run) / "checkpoints"
    write_checkpoint(checkpoints / "model_1" / "sampler_weights" / "step-7.tar.gz")
    config = EngineConfig(
        base_model="tiny",
        checkpoints_base=checkpoints,
        external_inference_url=url,
        external_inference_lora_base=Path(run) / "adapters",
    )
    client = ExternalInferenceClient(config, database)
    request = SampleRequest.model_validate(
        {
            "base_model": "tiny",
            "num_samples": 2,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
            "sampling_params": {"temperature": 0.0, "max_tokens": 6, "seed": 1},
            "sampling_session_id": "s",
            "seq_id": 3,
        }
    )
    made = {}
    for number, base_model in enumerate(("tiny", None), 1):
        async with AsyncSession(database) as session:
            future = FutureDB(
                request_id=number, request_type=types.RequestType.EXTERNAL, request_data={}
            )
            session.add(future)
            await session.commit()
        await client.call_and_store_result(
            number, request, "model_1", "step-7", base_model=base_model
        )
        async with AsyncSession(database) as session:
            found = await session.get(FutureDB, number)
        assert found.status == RequestStatus.COMPLETED, found.result_data
        output = SimpleNamespace(**found.result_data)
        for each in output.sequences:
            assert len(each["tokens"]) == len(each["logprobs"]) > 0
            assert each["stop_reason"] in ("stop", "length")
        made[base_model or "adapter"] = output.sequences[0]["tokens"]
    assert made["tiny"] != made["adapter"], made
    print(json.dumps(made))


asyncio.run(main())
