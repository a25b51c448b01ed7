"""The packaged target as a Llama checkpoint in Hugging Face's format, and a small draft model trained for it.

    python -m autotune.ddtree.llama models/py-target models/py-draft --minutes 3

For engines that draft with a model of its own, such as vLLM. The target is converted exactly: everything written to the
residual stream is centred, so that its layer norms become RMS norms, and its rotary pairs are reordered from neighbours
to halves. The draft is a decoder of the same kind with fewer layers, taught on the CPU by the target's distributions.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from autotune.ddtree.arguments import PACKAGED_MODEL, Shape
from autotune.ddtree.executor import continue_text
from autotune.ddtree.model import Target, load_weights, rotations, run_target
from autotune.ddtree.train import TEMPERATURES, encode, optimise, read_text, say

END = "<|endoftext|>"
FILES = 240  # of the corpus that are read
PROMPT, NEW = 48, 208  # tokens of a prompt and of its continuation
PROMPTS = 32  # that the target goes on from at a time
LEAST_S = 5.0  # of training
BATCH = 4  # sequences of a training step
WRITING = 0.3  # share of the time in which the target writes what the draft learns from


def checkpoint(tensors: Mapping[str, Tensor], shape: Shape, idle_layers: int = 0) -> dict[str, Tensor]:
    """The tensors of a LlamaForCausalLM whose logits are those of the target in `tensors`."""
    width, heads, half = shape.width, shape.heads, shape.head_width // 2

    def halves(rows: Tensor) -> Tensor:
        """[width, width] of queries or keys: within each head, first the even rows, then the odd ones."""
        return rows.view(heads, half, 2, width).transpose(1, 2).reshape(width, width)

    def centred(weight: Tensor) -> Tensor:
        """[outputs, inputs] whose outputs have a mean of 0."""
        return weight - weight.mean(0)

    embedding = tensors["embedding"]
    out = {"model.embed_tokens.weight": embedding - embedding.mean(1, keepdim=True), "lm_head.weight": embedding,
           "model.norm.weight": tensors["norm"]}
    for index in range(shape.layers + idle_layers):
        idle, name = index >= shape.layers, f"model.layers.{index}."
        old = {key: tensors[f"target.{min(index, shape.layers - 1)}.{key}"]
               for key in ("norm1", "qkv", "out", "norm2", "gate_up", "down")}
        query, key, value = torch.split(old["qkv"], width)
        gate, up = old["gate_up"].chunk(2)
        out |= {f"{name}input_layernorm.weight": old["norm1"], f"{name}post_attention_layernorm.weight": old["norm2"],
                f"{name}self_attn.q_proj.weight": halves(query), f"{name}self_attn.k_proj.weight": halves(key),
                f"{name}self_attn.v_proj.weight": value, f"{name}mlp.gate_proj.weight": gate,
                f"{name}mlp.up_proj.weight": up,
                f"{name}self_attn.o_proj.weight": centred(old["out"]) * (not idle),
                f"{name}mlp.down_proj.weight": centred(old["down"]) * (not idle)}
    return {name: tensor.float().clone().contiguous() for name, tensor in out.items()}


def write(folder: Path, tensors: Mapping[str, Tensor], shape: Shape, tokenizer: Tokenizer,
          idle_layers: int = 0) -> None:
    """Write config.json, generation_config.json, the tokenizer and float32 weights to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = {"bos_token_id": shape.eos, "eos_token_id": shape.eos}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": shape.vocab_size,
              "hidden_size": shape.width, "intermediate_size": shape.hidden, "head_dim": shape.head_width,
              "num_hidden_layers": shape.layers + idle_layers, "num_attention_heads": shape.heads,
              "num_key_value_heads": shape.heads, "max_position_embeddings": shape.max_position, "rms_norm_eps": 1e-5,
              "rope_theta": shape.rope_base, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
              "tie_word_embeddings": False, "torch_dtype": "float32", **ids}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=1) + "\n")
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=False))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END, "pad_token": END,
        "model_max_length": shape.max_position}, indent=1) + "\n")
    save_file(checkpoint(tensors, shape, idle_layers), str(folder / "model.safetensors"), metadata={"format": "pt"})


def train_draft(tensors: Mapping[str, Tensor], shape: Shape, stream: Tensor, layers: int,
                seconds: float) -> tuple[dict[str, Tensor], Shape]:
    """A decoder of `layers` layers that predicts what the target writes; `stream`: tokens of text for the prompts.

    It starts from the target's embedding and first layers. Loss: cross-entropy with the next token and with the
    target's distribution, in equal parts; every other step is on what the target wrote, the rest on the text itself.
    """
    target, factors = Target(shape, tensors), rotations(shape, shape.max_position)
    generator = torch.Generator().manual_seed(0)
    written: list[Tensor] = []
    start = time.monotonic()

    def windows(count: int, length: int) -> Tensor:
        at = torch.randint(len(stream) - length, (count, 1), generator=generator)
        return stream[at + torch.arange(length)].long()

    while not written or time.monotonic() - start < WRITING * seconds:
        written.append(continue_text(target, shape, windows(PROMPTS, PROMPT), NEW, TEMPERATURES))
    text = torch.cat(written)
    say(f"the target wrote {len(text) * NEW} tokens")
    small = replace(shape, layers=layers, taps=(layers,))
    names = ("embedding", "norm", *(n for n in tensors if n.startswith("target.") and int(n.split(".")[1]) < layers))
    learned = {name: tensors[name].clone() for name in names}
    draft, steps = Target(small, learned), 0

    def loss() -> Tensor:
        nonlocal steps
        steps += 1
        own = text[torch.randint(len(text), (BATCH,), generator=generator)]
        tokens = own if steps % 2 else windows(BATCH, PROMPT + NEW)
        with torch.no_grad():
            last, _ = run_target(target, shape, tokens, factors)
            taught = F.linear(target.finish(last[:, PROMPT - 1:-1]), target.embedding).softmax(-1)
        x, _ = run_target(draft, small, tokens, factors)
        guesses = F.linear(draft.finish(x[:, PROMPT - 1:-1]), draft.embedding).log_softmax(-1)
        hard = guesses.gather(-1, tokens[:, PROMPT:, None])[..., 0]
        return -(((taught * guesses).sum(-1) + hard) * 0.5).mean()

    left = max(LEAST_S, seconds - (time.monotonic() - start))
    optimise(list(learned.values()), loss, 2e-3, left, torch.device("cpu"), "draft")
    return learned, small


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m autotune.ddtree.llama",
                                     description=(__doc__ or "").partition("\n")[0])
    flag = parser.add_argument
    flag("target", type=Path, help="folder for the target")
    flag("draft", type=Path, help="folder for the draft")
    flag("--minutes", type=float, default=3.0, help="wall time for the draft's training")
    flag("--draft-layers", type=int, default=1)
    flag("--idle-layers", type=int, default=0, help="layers without an effect, appended to the target")
    flag("--corpus", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="directory of .py files")
    given = parser.parse_args()
    shape, tensors = Shape.load(PACKAGED_MODEL), load_weights(PACKAGED_MODEL)
    tokenizer = Tokenizer.from_file(str(PACKAGED_MODEL / "tokenizer.json"))
    write(given.target, tensors, shape, tokenizer, given.idle_layers)
    texts, _ = read_text(given.corpus)
    stream = encode(tokenizer, texts[:: max(1, len(texts) // FILES)], shape.eos)
    write(given.draft, *train_draft(tensors, shape, stream, given.draft_layers, given.minutes * 60), tokenizer)
    say(f"wrote {given.target} and {given.draft}")


if __name__ == "__main__":
    main()
