"""Model folders with a real shape and no weights, to try a space where no checkpoint is at hand.

    python -m autotune.engine.random_model models/dense-8b --shape dense-8b
    python -m autotune.engine.random_model models/dense-8b-draft --draft-for models/dense-8b

Serve them with dummy weights (`--load-format dummy`, in a space: load_format: {choices: [dummy]}). Speed and power are
realistic, the text is not: greedy decoding repeats itself, so n-gram speculation accepts almost everything and a random
draft nothing. Needs the package `tokenizers`; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.records import UsageError

END = "<|end|>"
MASK = "<|mask|>"
CORPUS_BYTES_PER_ID = 120

DENSE: Mapping[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MOE: Mapping[str, Any] = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
                          "mlp_only_layers": [], "norm_topk_prob": True}
MLA_MOE: Mapping[str, Any] = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "n_group": 1,
                              "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
                              "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_shared_experts": 1,
                              "first_k_dense_replace": 1, "moe_layer_freq": 1}

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "dense-tiny": {**DENSE, "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "head_dim": 64,
                   "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    "moe-tiny": {**MOE, "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "head_dim": 64,
                 "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
                 "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2},
    "mla-moe-tiny": {**MLA_MOE, "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024,
                     "num_hidden_layers": 4, "num_attention_heads": 64, "num_key_value_heads": 64,
                     "q_lora_rank": 256, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
                     "v_head_dim": 128, "moe_intermediate_size": 256, "n_routed_experts": 32,
                     "num_experts_per_tok": 4},
    "dense-8b": {**DENSE, "vocab_size": 32768, "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128,
                 "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8},
}
"""Shapes by name, as fields of a Hugging Face config.json. mla-moe-tiny: the attention of Kimi K2 and DeepSeek V3."""

COMMON: Mapping[str, Any] = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
                             "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
                             "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 0}


def write_model(folder: Path, shape: str) -> None:
    """Write config.json, generation_config.json and a tokenizer of the shape's vocabulary size to `folder`."""
    config = {**COMMON, **SHAPES[shape]}
    _write(folder, config)
    _train_tokenizer(folder, int(config["vocab_size"]))


def write_draft(folder: Path, target: Path, block_size: int = 8, layers: int = 5) -> None:
    """Write a DFlash draft for the dense model in `target`: its width and tokenizer, `layers` layers.

    Raises UsageError when `target` holds no model that this script wrote.
    """
    try:
        config = json.loads((target / "config.json").read_text())
        tokenizer = {name: (target / name).read_text() for name in ("tokenizer.json", "tokenizer_config.json")}
    except OSError as error:
        raise UsageError(f"--draft-for {target}: {error.strerror}: {error.filename}; make the target first") from error
    depth = config["num_hidden_layers"]
    fused = [1 + depth * index // layers for index in range(layers)]
    _write(folder, {**config, "architectures": ["DFlashDraftModel"], "num_hidden_layers": layers,
                    "num_target_layers": depth, "block_size": block_size,
                    "dflash_config": {"block_size": block_size, "mask_token_id": 1, "target_layer_ids": fused}})
    for name, content in tokenizer.items():
        (folder / name).write_text(content)


def _write(folder: Path, config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    ids = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")


def _train_tokenizer(folder: Path, size: int) -> None:
    """A byte-level BPE learned from the standard library's sources; every id below `size` has a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[END, MASK], initial_alphabet=alphabet,
                                  show_progress=False)
    tokenizer.train_from_iterator(_corpus(CORPUS_BYTES_PER_ID * size), trainer)
    have = tokenizer.get_vocab_size()
    tokenizer.add_tokens([f" word{index}" for index in range(have, size)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": END, "pad_token": END,
        "model_max_length": COMMON["max_position_embeddings"],
    }, indent=2) + "\n")


def _corpus(left: int) -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="ignore")
        yield source
        left -= len(source)
        if left < 0:
            return


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m autotune.engine.random_model",
                                     description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the model goes")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--shape", choices=SHAPES)
    kind.add_argument("--draft-for", type=Path, metavar="TARGET", help="a DFlash draft for the model in TARGET")
    given = parser.parse_args(argv)
    try:
        if given.shape:
            write_model(given.folder, given.shape)
        else:
            write_draft(given.folder, given.draft_for)
    except UsageError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
