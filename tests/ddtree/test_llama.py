"""The packaged target as a Llama checkpoint: the same logits by Llama's own formulas, with any idle layers."""

from __future__ import annotations

import json
import pathlib
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer

from autotune.ddtree.arguments import PACKAGED_MODEL, Shape

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
    from safetensors.torch import load_file
    from torch import Tensor

    from autotune.ddtree import llama
    from autotune.ddtree.executor import continue_text
    from autotune.ddtree.model import Target, load_weights, rotations, run_target


def forward(folder: pathlib.Path, tokens: Tensor) -> Tensor:
    """Logits [n, vocabulary] of a Llama checkpoint for tokens [n] (Touvron et al. 2023; rotary pairs are halves)."""
    config, stored = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    heads, width = config["num_attention_heads"], config["head_dim"]
    frequency = config["rope_theta"] ** -(torch.arange(0, width, 2) / width)
    angle = torch.outer(torch.arange(len(tokens)), frequency).repeat(1, 2)

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]) * stored[name]

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * angle.cos() + torch.cat([-second, first], -1) * angle.sin()

    x = stored["model.embed_tokens.weight"][tokens]
    for index in range(config["num_hidden_layers"]):
        part = {name: stored[f"model.layers.{index}.{name}.weight"] for name in
                ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
                 "mlp.up_proj", "mlp.down_proj")}
        a = norm(x, f"model.layers.{index}.input_layernorm.weight")
        q, k, v = (F.linear(a, part[f"self_attn.{n}_proj"]).view(-1, heads, width).transpose(0, 1) for n in "qkv")
        mixed = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        x = x + F.linear(mixed.transpose(0, 1).flatten(1), part["self_attn.o_proj"])
        a = norm(x, f"model.layers.{index}.post_attention_layernorm.weight")
        x = x + F.linear(F.silu(F.linear(a, part["mlp.gate_proj"])) * F.linear(a, part["mlp.up_proj"]),
                         part["mlp.down_proj"])
    return F.linear(norm(x, "model.norm.weight"), stored["lm_head.weight"])


@pytest.mark.parametrize("idle_layers", [0, 2])
def test_the_checkpoint_gives_the_logits_of_the_packaged_target(tmp_path: pathlib.Path, idle_layers: int) -> None:
    shape, tensors = Shape.load(PACKAGED_MODEL), load_weights(PACKAGED_MODEL)
    tokenizer = Tokenizer.from_file(str(PACKAGED_MODEL / "tokenizer.json"))
    llama.write(tmp_path, tensors, shape, tokenizer, idle_layers)
    tokens = torch.tensor(tokenizer.encode("def main(argv):\n    for name in argv:\n        print(name)\n").ids)
    target = Target(shape, tensors)
    final, _ = run_target(target, shape, tokens[None], rotations(shape, 64))
    wanted = F.linear(target.finish(final[0]), target.embedding)
    torch.testing.assert_close(forward(tmp_path, tokens), wanted, rtol=1e-4, atol=1e-3)
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == shape.layers + idle_layers


@pytest.mark.slow
def test_training_improves_the_predictions_of_a_draft() -> None:
    shape, tensors = Shape.load(PACKAGED_MODEL), load_weights(PACKAGED_MODEL)
    tokenizer = Tokenizer.from_file(str(PACKAGED_MODEL / "tokenizer.json"))
    stream = torch.tensor(tokenizer.encode(pathlib.Path(llama.__file__).read_text()).ids)
    learned, small = llama.train_draft(tensors, shape, stream, 1, 30.0)
    untrained = {name: tensors[name] for name in learned}
    prompts = stream[:8 * 48].view(8, 48).long()
    factors = rotations(shape, 128)
    with torch.inference_mode():
        text = continue_text(Target(shape, tensors), shape, prompts, 64, [0.0])
        believed = []  # mean log-probability of the tokens of the target
        for some in (untrained, learned):
            draft = Target(small, some)
            x, _ = run_target(draft, small, text, factors)
            guesses = F.linear(draft.finish(x[:, 47:-1]), draft.embedding).log_softmax(-1)
            believed.append(guesses.gather(-1, text[:, 48:, None]).mean().item())
    assert believed[1] > believed[0] + 0.2
