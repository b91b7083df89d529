"""The modules of a model that take the kernels; a caller beside the executor never takes them."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
import torch

from nano_inference.config import EngineConfig
from nano_inference.stages.executor.core import ExecutorCore
from nano_inference.stages.executor.runner.fast_modules.decoder import DecoderLayers
from nano_inference.stages.executor.runner.fast_modules.patterns import RotaryFactors
from nano_inference.stages.executor.runner.fixed_tiles import FixedTiles
from nano_inference.stages.executor.runner.model import wrap_model

from .....soaking import in_soak
from ...lane import lane_of
from ...models import ARCHITECTURES, make_model
from ...refusals import needs_kernels
from ...report import MAX_DIFFERENCE
from ...threads import several_threads

PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7], list(range(20, 90)))
NEW_TOKENS = 12


DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def kernels() -> None:
    needs_kernels(*DTYPES)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


def model_in(dtype: torch.dtype, name: str, **changes: Any) -> Any:
    return make_model(name, **changes).to(dtype)


def bfloat16(name: str, **changes: Any) -> Any:
    return model_in(torch.bfloat16, name, **changes)


def core_of(model: Any, **changes: Any) -> ExecutorCore:
    return ExecutorCore(EngineConfig(max_model_len=256, **changes), model=wrap_model(model, 256))


JOINED = ("llama", "qwen2", "qwen3", "mistral")
"""Architectures whose layers are computed in one call."""

EVERY = {"DecoderLayer", "Attention", "MLP", "RMSNorm"}

TAKEN = {
    **dict.fromkeys(JOINED, EVERY),
    **dict.fromkeys(("gemma2", "gemma3_text"), EVERY - {"DecoderLayer"}),
    "phi3": {"RMSNorm"},
    "olmo2": {"MLP", "RMSNorm"},
}
"""The ends of the names of classes, besides linear layers."""


@pytest.mark.parametrize("name", TAKEN)
def test_the_patterns_match_their_modules(name: str, dtype: torch.dtype) -> None:
    core = core_of(model_in(dtype, name, head_dim=32))
    assert core.off.get("kernels", "") == ""
    assert core.runner.fast_modules is not None
    assert core.runner.fast_modules.count["Linear"]
    found = {
        part
        for part in EVERY
        if any(each.endswith(part) for each in core.runner.fast_modules.count)
    }
    assert found == TAKEN[name]
    for end in ("Model", "ForCausalLM"):
        joined = [each for each in core.runner.fast_modules.count if each.endswith(end)]
        assert len(joined) == (name in JOINED)
        assert not any(each.endswith(end) for each in core.runner.fast_modules.refused)


@pytest.mark.parametrize(
    "name",
    [name if name in ("qwen2", "gemma2", "gpt_oss") else in_soak(name) for name in ARCHITECTURES],
)
def test_fast_passes_are_as_near_to_float32_as_plain_ones(name: str) -> None:
    """With heads of 32, so that every pattern may apply; see test_parity for the bound."""
    model = bfloat16(name, head_dim=32)
    exact = make_model(name, head_dim=32).to(torch.bfloat16).float()
    distances = []
    choices: tuple[Literal["auto", "off"], ...] = ("auto", "off")
    for kernels in choices:
        answers = lane_of(wrap_model(model, 256), kernels=kernels).run(PROMPTS, NEW_TOKENS)
        found, wanted = [], []
        for answer in answers:
            ids = torch.tensor([[*answer.prompt, *answer.token_ids]])
            with torch.inference_mode():
                logits = exact(ids, use_cache=False).logits[0, len(answer.prompt) - 1 : -1]
            chosen = torch.tensor(answer.token_ids)[:, None]
            wanted.append(logits.log_softmax(-1).gather(1, chosen)[:, 0])
            found.append(torch.tensor(answer.logprobs))
        distances.append(float((torch.cat(found) - torch.cat(wanted)).abs().mean()))
    assert 0 < distances[0] <= 1.5 * distances[1]


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("qwen2", "qwen3", "mistral", "gemma2", "phi3", "olmo2") else in_soak(name)
        for name in ARCHITECTURES
    ],
)
def test_float32_is_that_of_transformers_but_for_rounding(name: str) -> None:
    """With heads of 32, which test_parity does not have."""
    model = make_model(name, head_dim=32)
    lane = lane_of(wrap_model(copy.deepcopy(model), 256))
    for answer in lane.run(PROMPTS, NEW_TOKENS):
        ids = torch.tensor([[*answer.prompt, *answer.token_ids]])
        with torch.inference_mode():
            logits = model(ids, use_cache=False).logits[0, len(answer.prompt) - 1 : -1]
        assert answer.token_ids == logits.argmax(-1).tolist()
        logprobs = logits.double().log_softmax(-1).amax(-1)
        assert (torch.tensor(answer.logprobs) - logprobs).abs().max() < MAX_DIFFERENCE


@pytest.mark.parametrize(("dtype", "factor"), [(torch.bfloat16, 1.1), (torch.float32, 1.0001)])
def test_a_module_that_computes_something_else_stays_as_it_is(
    dtype: torch.dtype, factor: float
) -> None:
    model = model_in(dtype, "llama", head_dim=32)
    norm = model.model.layers[1].post_attention_layernorm
    plain = norm.forward
    norm.forward = lambda x: plain(x) * factor
    core = core_of(model)
    assert core.runner.fast_modules.count["LlamaDecoderLayer"] == 2
    assert core.runner.fast_modules.count["LlamaRMSNorm"] == 6
    assert core.runner.fast_modules.refused.keys() == {"LlamaDecoderLayer", "LlamaRMSNorm"}


def answers(model: Any, **changes: Any) -> list[tuple[list[int], list[float]]]:
    lane = lane_of(wrap_model(model, 256), **changes)
    return [(each.token_ids, each.logprobs) for each in lane.run(PROMPTS, NEW_TOKENS)]


def test_a_module_of_another_dtype_stays_as_it_is(dtype: torch.dtype) -> None:
    """Such as a router that is kept in float32."""
    model = model_in(dtype, "llama", head_dim=32)
    (other,) = set(DTYPES) - {dtype}
    gate = model.model.layers[1].mlp.gate_proj
    gate.to(other)
    gate.forward = lambda x: torch.nn.functional.linear(x.to(other), gate.weight).to(dtype)
    core = core_of(model)
    assert core.runner.fast_modules.count["LlamaDecoderLayer"] == 2
    assert core.runner.fast_modules.count["LlamaMLP"] == 2
    assert "forward" in vars(model.model.layers[0].mlp.gate_proj)
    core.runner.fast_modules.remove()
    assert [module for module in model.modules() if "forward" in vars(module)] == [gate]


@pytest.mark.parametrize(
    # Every day each model once in each dtype.
    ("name", "most"),
    [
        (name, most) if (most == 16) == place % 2 else in_soak(name, most)
        for place, name in enumerate(JOINED)
        for most in (2048, 16)
    ],
)
def test_layers_in_one_call_give_the_bits_of_single_passes(
    name: str, most: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a window that the longest prompt has outgrown, where the model has one.

    Also with the last layer left out for unread tokens.
    """
    model = model_in(dtype, name, head_dim=32)
    taken: list[int] = []
    left_out: list[int] = []
    call = DecoderLayers.__call__

    def counted(self: DecoderLayers, rows: torch.Tensor, *args: Any) -> None:
        taken.append(len(rows))
        read = args[2].read
        left_out.append(0 if read is None else len(rows) - read.rows.count)
        call(self, rows, *args)

    monkeypatch.setattr(DecoderLayers, "__call__", counted)
    in_one_call = answers(model, max_tokens_per_batch=most)
    assert taken.count(len(PROMPTS)) >= NEW_TOKENS // 2
    # Not if most of a step's tokens are read.
    assert 0 <= sum(map(len, PROMPTS)) - len(PROMPTS) - sum(left_out) <= 2
    monkeypatch.setattr(DecoderLayers, "handles", lambda batch: False)
    taken.clear()
    assert answers(model_in(dtype, name, head_dim=32)) == in_one_call
    assert not taken


@pytest.mark.soak
def test_threads_that_go_through_the_layers_together_change_no_bit(
    dtype: torch.dtype, soak: bool
) -> None:
    found = []
    for number in (1, 2, 3) if soak else (1, 3):
        with several_threads(number):
            # So large that the work is shared.
            model = model_in(dtype, "qwen3", head_dim=32, hidden_size=256, intermediate_size=704)
            found.append(answers(model))
    assert all(each == found[0] for each in found[1:])


def put_others_in(model: Any) -> None:
    """New tensors elsewhere for all parameters of layers; the old ones stay alive with `model`."""
    generator = torch.Generator().manual_seed(1)
    layers = model.model.layers
    model.old = dict(layers.named_parameters())
    for name, old in model.old.items():
        scale = 1 + torch.rand(old.shape, generator=generator)
        owner, _, attribute = name.rpartition(".")
        new = (old.float() * scale).to(old.dtype)
        setattr(layers.get_submodule(owner), attribute, torch.nn.Parameter(new, False))


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_layers_in_one_call_use_the_weights_that_the_model_has_now(
    name: str, dtype: torch.dtype
) -> None:
    model, other = (model_in(dtype, name, head_dim=32) for _ in range(2))
    lane = lane_of(wrap_model(model, 256))
    before = [each.logprobs for each in lane.run(PROMPTS, NEW_TOKENS)]
    put_others_in(model)
    put_others_in(other)
    lane.batching.cache.flush()
    after = [each.logprobs for each in lane.run(PROMPTS, NEW_TOKENS)]
    assert after == [logprobs for _, logprobs in answers(other)] != before


@pytest.mark.parametrize(
    ("which", "gives", "parts", "refused"),
    [
        ("model", "last_hidden_state", {"LlamaDecoderLayer": 3}, "LlamaModel"),
        ("", "logits", {"LlamaModel": 1}, "LlamaForCausalLM"),
    ],
    ids=["decoder", "decoder and output layer"],
)
def test_modules_that_do_more_than_their_parts_stay_unchanged(
    which: str, gives: str, parts: dict[str, int], refused: str
) -> None:
    model = bfloat16("llama", head_dim=32)
    module = model.get_submodule(which)
    plain = module.forward

    def scaled(**kwargs: Any) -> Any:
        output = plain(**kwargs)
        output[gives] = output[gives] * 1.01
        return output

    module.forward = scaled
    found = core_of(model).runner.fast_modules
    assert parts.items() <= found.count.items()
    assert found.refused == {refused: "it computes something else"}


def test_hooks_on_a_decoder_see_all_tokens() -> None:
    model = bfloat16("llama", head_dim=32)
    heard: list[int] = []

    def listen(module: Any, args: Any, output: Any) -> None:
        heard.append(output.last_hidden_state.shape[1])

    lane = lane_of(wrap_model(model, 256))
    wanted = lane.run(PROMPTS, NEW_TOKENS)
    model.model.register_forward_hook(listen)
    lane.batching.cache.flush()
    assert lane.run(PROMPTS, NEW_TOKENS) == wanted
    assert sum(heard) == lane.computed


def test_other_callers_run_transformers_own_code() -> None:
    model = bfloat16("qwen2", head_dim=32)
    reference = bfloat16("qwen2", head_dim=32)
    core = core_of(model)
    assert core.runner.fast_modules.count
    model.set_attn_implementation("eager")
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(model(ids).logits, reference(ids).logits)
    model.train()
    model(ids).logits.float().sum().backward()
    assert model.model.layers[0].mlp.gate_proj.weight.grad is not None


def test_closing_restores_the_model() -> None:
    model = bfloat16("llama", head_dim=32)
    norm = model.model.norm
    plain = norm.forward
    norm.forward = own = lambda x: plain(x)
    core = core_of(model)
    assert core.runner.fast_modules.count["LlamaRMSNorm"] == 7
    core.close()
    left = [module for module in model.modules() if "forward" in vars(module)]
    assert left == [norm]
    assert norm.forward is own


@pytest.mark.parametrize(
    ("dtype", "changes", "why"),
    [
        (torch.float16, {}, "there are none for torch.float16"),
        (torch.float32, {"kernels": "off"}, "engine.kernels is off"),
        (torch.bfloat16, {"kernels": "off"}, "engine.kernels is off"),
    ],
)
def test_a_model_without_kernels_says_why(
    dtype: torch.dtype, changes: dict[str, Any], why: str
) -> None:
    core = core_of(make_model("llama").to(dtype), **changes)
    assert why in core.off.get("kernels", "")
    assert core.runner.fast_modules is None


def test_kept_rotary_factors_are_the_model_s(dtype: torch.dtype) -> None:
    rotary, hidden = make_model("qwen2", head_dim=32).model.rotary_emb, torch.zeros(1, dtype=dtype)
    factors = RotaryFactors(rotary, 32, FixedTiles(), 5000)
    for positions in ([3, 0], [1023], [4999, 1024], [7, 7, 2]):
        ids = torch.tensor([positions])
        cos, sin, places = factors.of(hidden, ids)
        assert places is ids
        for found, wanted in zip((cos, sin), rotary(hidden, ids), strict=True):
            torch.testing.assert_close(found[positions], wanted[0])
