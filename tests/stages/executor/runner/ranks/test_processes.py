"""Ranks as processes: what a model over two of them does is what it does on one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from nano_inference import InferenceEngine, SamplingParams, TrainingSample, WeightsGroup
from nano_inference.config import AdapterError, ConfigError, EngineConfig, ModelError, WeightsError
from nano_inference.stages.executor.parts.memory import MemoryRelease
from nano_inference.stages.executor.runner.fast_modules.modules import FastModules
from nano_inference.stages.executor.runner.ranks.commands import Reply
from nano_inference.stages.executor.runner.ranks.processes import Ranks
from nano_inference.stages.executor.runner.ranks.rank_error import RankError
from nano_inference.stages.executor.runner.ranks.shared_memory import SharedMemoryGroup
from nano_inference.stages.executor.runner.weights.parts import PartsTaker

from .....pipeline import short_model
from .....programs import run
from .....soaking import in_soak

CONFIG = EngineConfig(
    model_path=str(short_model.folder()),
    dtype="float32",
    max_model_len=256,
    # So few blocks that sequences are preempted, and blocks are copied.
    kv_cache_bytes=1 << 20,
    deterministic=True,
    rank_invariant=True,
    rank_timeout_s=20.0,
)
RANKS = 2


@pytest.fixture(scope="module")
def alone() -> Iterator[InferenceEngine]:
    with InferenceEngine(CONFIG) as engine:
        yield engine


@pytest.fixture(scope="module")
def spread() -> Iterator[InferenceEngine]:
    config = EngineConfig(**{**_fields(CONFIG), "tensor_parallel": RANKS})
    with InferenceEngine(config) as engine:
        yield engine


def _fields(config: EngineConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


def ranks_of(engine: InferenceEngine) -> Ranks:
    ranks = engine._executor.ranks
    assert ranks is not None
    return ranks


def rollouts(engine: InferenceEngine) -> list[TrainingSample]:
    prompts = [[5 + index % 3] * (40 + 9 * index) for index in range(8)]
    sampling = [
        SamplingParams(
            temperature=float(index % 2),
            seed=index,
            max_tokens=24,
            ignore_eos=True,
            logprobs=2,
            prompt_logprobs=1 if index % 4 == 0 else None,
        )
        for index in range(8)
    ]
    samples = engine.generate(prompts, sampling, num_samples_per_prompt=2)
    # The recipe has the number of ranks.
    return [replace(sample, recipe=None) for sample in samples]


def vectors(engine: InferenceEngine) -> list[list[float]]:
    return [each.tolist() for each in engine.embed(["a prompt", "another one, longer"])]


def test_every_number_is_that_of_one_rank(alone: InferenceEngine, spread: InferenceEngine) -> None:
    assert rollouts(spread) == rollouts(alone)
    assert vectors(spread) == vectors(alone)


def test_each_rank_takes_its_part_of_new_weights(
    alone: InferenceEngine, spread: InferenceEngine
) -> None:
    before, new = rollouts(alone), random_weights(alone, 5)
    for engine in (alone, spread):
        engine.update_weights(new, blocking=True)
    assert rollouts(spread) == rollouts(alone) != before
    for engine in (alone, spread):
        engine.release_memory()
        engine.resume_memory()
        engine.update_weights(new, blocking=True)
    after = rollouts(spread)
    assert after == rollouts(alone)
    assert after[0].weight_version == 2


def random_weights(engine: InferenceEngine, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    own = engine._executor.model.shards
    assert own is not None
    return {
        name: torch.randn(shard.shape, generator=generator) * 0.02
        for name, shard in own.shards.items()
        if name != "lm_head.weight"  # it is the embedding's
    }


def test_each_rank_receives_a_trainers_broadcast_for_itself(
    alone: InferenceEngine, spread: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bits of one rank; and an update of which ranks have other bytes changes nothing."""
    forwarded: list[int] = []
    broadcast = SharedMemoryGroup.broadcast

    def count(group: SharedMemoryGroup, tensor: torch.Tensor) -> None:
        forwarded.append(tensor.nbytes)
        broadcast(group, tensor)

    new = random_weights(alone, 7)
    with WeightsGroup("127.0.0.1:0", 1 + RANKS) as trainer:
        with pytest.raises(WeightsError, match="ranks are 2 to 3 of the group"):
            spread.join_weights_group("weights", trainer.address, 1 + RANKS, rank=2)
        spread.join_weights_group("weights", trainer.address, 1 + RANKS)
        sending = trainer.broadcast(new, bucket_bytes=1 << 20)
        with monkeypatch.context() as patch:
            patch.setattr(SharedMemoryGroup, "broadcast", count)
            spread.update_weights(sending.source, blocking=True)
        sending.result()
        # The names alone.
        assert sum(forwarded) < 1000
        alone.update_weights(new, blocking=True)
        expected = rollouts(alone)
        assert rollouts(spread) == expected
        sending = trainer.broadcast(random_weights(alone, 8))
        with monkeypatch.context() as patch:
            patch.setattr(PartsTaker, "checksum", 1)
            with pytest.raises(WeightsError, match="different bytes"):
                spread.update_weights(sending.source, blocking=True)
        with pytest.raises(WeightsError, match="not in the group"):
            spread.update_weights(sending.source)
        assert rollouts(spread) == expected


def adapter_tensors(engine: InferenceEngine, seed: int) -> dict[str, torch.Tensor]:
    """Random tensors for every linear layer, of rank 4."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, module in engine._executor.model.whole.named_modules():
        if type(module) is torch.nn.Linear and name != "lm_head":
            for half, shape in (("A", (4, module.in_features)), ("B", (module.out_features, 4))):
                tensor = torch.randn(shape, generator=generator) * 0.2
                found[f"{name}.lora_{half}.weight"] = tensor
    return found


def check_adapters(alone: InferenceEngine, spread: InferenceEngine) -> None:
    """Adapters are loaded, updated while requests run, and unloaded, with one rank's tokens."""
    engines = (alone, spread)
    for engine in engines:
        for seed, id in enumerate("ab"):
            engine.load_adapter(id, adapter_tensors(engine, seed), {"r": 4})
    found = [with_adapters(engine) for engine in engines]
    assert found[0] == found[1]
    assert len({*found[0].values()}) == len(found[0]) == 6
    for engine in engines:
        engine.unload_adapter("a", in_flight="abort")
        engine.unload_adapter("b")
        assert engine.adapters() == ()


def with_adapters(engine: InferenceEngine) -> dict[tuple[str, int], tuple[int, ...]]:
    """Tokens of requests with different adapters in one batch, one of which changes meanwhile."""
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    ids = {
        engine.add_request([5 + number] * 50, sampling, adapter=adapter): (adapter, number)
        for adapter in ("", "a", "b")
        for number in range(2)
    }
    samples: list[TrainingSample] = []
    for number in range(200):
        samples += engine.step()
        if number == 4:
            engine.load_adapter("a", adapter_tensors(engine, 9), {"r": 4})
    assert not engine.has_pending()
    return {ids[each.request_id]: each.completion_tokens for each in samples}


def test_adapters_are_those_of_one_rank(alone: InferenceEngine, spread: InferenceEngine) -> None:
    check_adapters(alone, spread)


def test_an_adapter_is_loaded_on_all_ranks_or_on_none(
    alone: InferenceEngine, spread: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = adapter_tensors(spread, 0)
    replies = Ranks.replies

    def refusing(ranks: Ranks) -> list[Reply]:
        assert not any(reply.error for reply in replies(ranks))
        return [Reply(error="rank 1 has not enough memory", code="out_of_memory")]

    with monkeypatch.context() as patch:
        patch.setattr(Ranks, "replies", refusing)
        with pytest.raises(AdapterError, match="rank 1 has not enough memory") as raised:
            spread.load_adapter("c", tensors, {"r": 4})
    assert raised.value.code == "out_of_memory"
    assert spread.adapters() == ()
    # On every rank its slot is free for another one.
    check_adapters(alone, spread)


def test_memory_is_resumed_on_all_ranks_or_on_none(
    alone: InferenceEngine, spread: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread.release_memory(["kv_cache"])
    with monkeypatch.context() as patch:
        refusal = Reply(error="rank 1 has not enough memory", code="out_of_memory")
        patch.setattr(Ranks, "ask", lambda ranks, command: [refusal])
        with pytest.raises(WeightsError, match="rank 1 has not enough memory") as raised:
            spread.resume_memory(["kv_cache"])
    assert raised.value.code == "out_of_memory"
    assert spread._executor.part(MemoryRelease).memory.lacks == ("kv_cache",)
    spread.resume_memory(["kv_cache"])
    assert rollouts(spread) == rollouts(alone)


def test_settings_that_ranks_exclude_are_refused() -> None:
    with pytest.raises(ConfigError, match="kv_host_bytes"):
        EngineConfig(tensor_parallel=2, kv_host_bytes=1)
    with pytest.raises(ModelError, match="3"):
        InferenceEngine(
            EngineConfig(**{**_fields(CONFIG), "tensor_parallel": 3, "rank_invariant": False})
        )


@pytest.mark.parametrize("number", [signal.SIGKILL, in_soak(signal.SIGSTOP)])
def test_a_rank_that_ends_is_an_error_of_the_engine(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the midst of an update too, of which nothing is put in place. To load takes any time."""
    check = FastModules._compare

    def check_late(*args: Any) -> Any:
        monkeypatch.undo()
        time.sleep(1.2)
        return check(*args)

    monkeypatch.setattr(FastModules, "_compare", check_late)
    config = EngineConfig(**{**_fields(CONFIG), "tensor_parallel": RANKS, "rank_timeout_s": 1.0})
    with InferenceEngine(config) as engine, WeightsGroup("127.0.0.1:0", 1 + RANKS) as trainer:
        engine.join_weights_group("weights", trainer.address, 1 + RANKS)
        (pid,) = ranks_of(engine).pids
        os.kill(pid, number)
        sending = trainer.broadcast({"model.norm.weight": torch.ones(4)})
        with pytest.raises(WeightsError, match="a rank of the model has failed: rank 1"):
            engine.update_weights(sending.source, partial=True, timeout_s=1.0)
        with pytest.raises(RankError, match="rank 1"):
            engine.generate([[5, 6, 7]], SamplingParams(max_tokens=50, ignore_eos=True))
        assert engine.get_weight_version() == 0
    assert not Path(f"/proc/{pid}").exists()


KILLED = """
import os, signal
from nano_inference import EngineConfig, InferenceEngine
from nano_inference.stages.executor.runner.ranks import processes
engine = InferenceEngine(EngineConfig({fields}))
server = processes._fork_server(os.getpid())._process.pid
print(server, *engine._executor.ranks.pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_rank_outlives_the_executor(tmp_path: Path) -> None:
    fields = f"model_path={CONFIG.model_path!r}, dtype='float32', tensor_parallel=2"
    done = run(KILLED.format(fields=fields), tmp_path)
    assert done.status == -signal.SIGKILL, done.stderr
    pids = done.stdout.split()
    assert len(pids) == 2
    for pid in pids:
        wait_until_gone(Path(f"/proc/{pid}"))


def wait_until_gone(process: Path) -> None:
    for _ in range(500):
        try:
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":  # a zombie, where no init reaps it
            return
        time.sleep(0.02)
    pytest.fail(f"{process} is there")
