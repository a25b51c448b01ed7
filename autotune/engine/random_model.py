"""Model folders with a real shape and no weights, to try a space where no checkpoint is at hand.

    python -m autotune.engine.random_model models/dense-8b --shape dense-8b
    python -m autotune.engine.random_model models/dense-8b-draft --draft-for models/dense-8b

Serve them with dummy weights (in a space: load_format: {choices: [dummy]}). Speed and power are realistic, the text is
not: n-gram speculation accepts almost everything and a random draft nothing. Needs the package `tokenizers`.
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
from autotune.utils.files import write_json

END, MASK = "<|end|>", "<|mask|>"
CORPUS_BYTES_PER_ID = 120


def shapes() -> dict[str, dict[str, Any]]:
    """The configuration of each model of shapes.yaml, by name."""
    import yaml

    return dict(yaml.safe_load(Path(__file__).with_name("shapes.yaml").read_text("utf-8"))["shapes"])


def write_model(folder: Path, shape: str) -> None:
    """Write config.json, generation_config.json and a tokenizer of the shape's vocabulary size to `folder`."""
    config = shapes()[shape]
    _write(folder, config)
    _train_tokenizer(folder, config["vocab_size"], config["max_position_embeddings"])


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
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {key: config[key] for key in ("bos_token_id", "eos_token_id")})


def _train_tokenizer(folder: Path, size: int, longest: int) -> None:
    """A byte-level BPE learned from the standard library's sources; every id below `size` has a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[END, MASK], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(_corpus(CORPUS_BYTES_PER_ID * size), trainer)
    tokenizer.add_tokens([f" word{index}" for index in range(tokenizer.get_vocab_size(), size)])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": END, "pad_token": END,
        "model_max_length": longest})


def _corpus(size: int) -> Iterator[str]:
    """Python sources of at least `size` characters."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if size >= 0:
            yield (source := path.read_text(encoding="utf-8", errors="ignore"))
            size -= len(source)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m autotune.engine.random_model",
                                     description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the model goes")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--shape", choices=shapes())
    kind.add_argument("--draft-for", type=Path, metavar="TARGET", help="a DFlash draft for the model in TARGET")
    given = parser.parse_args(argv)
    try:
        write_model(given.folder, given.shape) if given.shape else write_draft(given.folder, given.draft_for)
    except UsageError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
