"""LoRA adapters: they change the answers of a model as merged weights do, and must fit it."""

import json
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx import nn
from mlx_vlm.models.switch_layers import SwitchLinear

from workers.demo import CHECKPOINT
from workers.engine.model.adapter import apply_adapter
from workers.engine.model.checkpoint import Checkpoint, load_checkpoint
from workers.engine.model.target import Target
from workers.engine.prefix.fingerprint import ModelFiles
from workers.engine.types import ModelUnusable

LAYER = "model.layers.1.self_attn.q_proj"
RANK, SCALE = 4, 2.5
PROMPT = mx.array([[20 + i for i in range(30)]])

Write = Callable[..., Path]


@pytest.fixture
def write_adapter(tmp_path: Path, checkpoint: Checkpoint) -> Write:
    """Return a function that writes an adapter of one layer, in the format of mlx-lm or PEFT."""
    outputs, inputs = checkpoint.target.language.model.layers[1].self_attn.q_proj.weight.shape
    mx.random.seed(3)
    first, second = mx.random.normal((inputs, RANK)), mx.random.normal((RANK, outputs))

    def write(*, peft: bool = False, layer: str = LAYER, **config: object) -> Path:
        folder = tmp_path / "tuned"
        folder.mkdir(exist_ok=True)
        if peft:
            tensors = {
                f"base_model.model.{layer}.lora_A.weight": first.T,
                f"base_model.model.{layer}.lora_B.weight": second.T,
            }
            settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK * SCALE}
        else:
            tensors = {f"{layer}.lora_a": first, f"{layer}.lora_b": second}
            parameters = {"rank": RANK, "scale": SCALE, "dropout": 0.0}
            settings = {"fine_tune_type": "lora", "lora_parameters": parameters}
        name = "adapter_model.safetensors" if peft else "adapters.safetensors"
        mx.save_safetensors(str(folder / name), {k: mx.contiguous(v) for k, v in tensors.items()})
        (folder / "adapter_config.json").write_text(json.dumps({**settings, **config}))
        return folder

    return write


def scores(target: Target) -> mx.array:
    positions = mx.arange(PROMPT.shape[1])[None]
    return target.scores(target.forward(PROMPT, target.new_caches(), positions), last=1)


@pytest.mark.parametrize("peft", [False, True])
def test_an_adapter_answers_as_its_merged_weights_do(write_adapter: Write, peft: bool) -> None:
    folder = write_adapter(peft=peft)
    adapted = load_checkpoint(CHECKPOINT, adapter=folder).target
    merged = load_checkpoint(CHECKPOINT).target
    before = scores(merged)
    (weights,) = (mx.load(str(path)) for path in folder.glob("*.safetensors"))
    pair = [weights[name] for name in sorted(weights)]
    first, second = [each.T for each in pair] if peft else pair
    projection = merged.language.model.layers[1].self_attn.q_proj
    projection.weight = projection.weight + SCALE * (first @ second).T

    assert mx.allclose(scores(adapted), scores(merged), atol=1e-3)
    assert not mx.allclose(scores(adapted), before, atol=1e-1)


def test_a_model_with_an_adapter_has_a_prefix_cache_of_its_own(write_adapter: Write) -> None:
    folder = write_adapter()
    found = [ModelFiles(CHECKPOINT).fingerprint(), ModelFiles(CHECKPOINT, folder).fingerprint()]
    write_adapter(layer="model.layers.3.self_attn.q_proj")
    found.append(ModelFiles(CHECKPOINT, folder).fingerprint())
    assert [len(set(values)) for values in zip(*filter(None, found), strict=True)] == [3, 3]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"layer": "model.layers.9.self_attn.q_proj"}, "no layer"),
        ({"layer": "model.layers.1.self_attn.k_proj"}, "in place of"),
        ({"layer": "model.norm"}, "it adapts"),
        ({"fine_tune_type": "dora"}, "no plain LoRA"),
        ({"fine_tune_type": "full"}, "no plain LoRA"),
        ({"lora_parameters": {"rank": "x"}}, "no scale"),
        ({"lora_parameters": {"scale": float("nan")}}, "no number"),
        ({"lora_parameters": []}, "no object"),
    ],
)
def test_an_adapter_that_does_not_fit_is_rejected_with_the_reason(
    write_adapter: Write, checkpoint: Checkpoint, options: dict[str, object], reason: str
) -> None:
    with pytest.raises(ModelUnusable, match=reason):
        apply_adapter(checkpoint.target.model, write_adapter(**options))


@pytest.mark.parametrize(
    ("sides", "rank", "reason"),
    [
        (("lora_a", "lora_c"), RANK, "no matrix of a LoRA"),
        (("lora_a",), RANK, "one matrix of two"),
        (("lora_a", "lora_b"), 1025, "rank is 1025"),
    ],
)
def test_tensors_that_are_no_pairs_of_an_adapter_are_rejected_with_the_reason(
    write_adapter: Write, checkpoint: Checkpoint, sides: tuple[str, ...], rank: int, reason: str
) -> None:
    folder = write_adapter()
    weight = checkpoint.target.language.model.layers[1].self_attn.q_proj.weight
    shapes = ((weight.shape[1], rank), (rank, weight.shape[0]))
    tensors = {
        f"{LAYER}.{side}": mx.zeros(shape) for side, shape in zip(sides, shapes, strict=False)
    }
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)
    with pytest.raises(ModelUnusable, match=reason):
        apply_adapter(checkpoint.target.model, folder)


def test_an_adapter_of_experts_answers_as_their_merged_weights_do(tmp_path: Path) -> None:
    experts = 3
    model = nn.Module()
    model.experts = SwitchLinear(8, 6, experts, bias=False)
    first, second = mx.random.normal((experts, RANK, 8)), mx.random.normal((experts, 6, RANK))
    merged = SwitchLinear(8, 6, experts, bias=False)
    merged.weight = model.experts.weight + SCALE * (second @ first)
    pair = {"experts.lora_a": first, "experts.lora_b": second}
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), pair)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"scale": SCALE}))

    assert apply_adapter(model, tmp_path) == 1
    rows, chosen = mx.random.normal((experts, 1, 8)), mx.arange(experts)
    assert mx.allclose(model.experts(rows, chosen), merged(rows, chosen), atol=1e-4)


def test_a_folder_without_an_adapter_is_rejected(tmp_path: Path, checkpoint: Checkpoint) -> None:
    (tmp_path / "adapter.py").write_text("raise SystemExit")
    with pytest.raises(ModelUnusable, match="holds no LoRA adapter"):
        apply_adapter(checkpoint.target.model, tmp_path)


def test_a_damaged_adapter_is_rejected(write_adapter: Write, checkpoint: Checkpoint) -> None:
    folder = write_adapter()
    (folder / "adapters.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ModelUnusable, match="does not fit"):
        apply_adapter(checkpoint.target.model, folder)
