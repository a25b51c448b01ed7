"""Random model folders: what a server reads of them."""

import json
import pathlib

import pytest
from tokenizers import Tokenizer

from autotune.engine.random_model import main, shapes


@pytest.mark.parametrize("shape", ["dense-tiny", "moe-tiny", "mla-moe-tiny"])
def test_a_model_has_a_configuration_and_a_tokenizer_for_each_of_its_ids(tmp_path: pathlib.Path, shape: str) -> None:
    assert main([str(tmp_path), "--shape", shape]) == 0
    config = json.loads((tmp_path / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == config["vocab_size"] == shapes()[shape]["vocab_size"]
    text = "def f(x):\n    return x + 1  # naïve ✓"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text and len(ids) < len(text.encode())
    assert tokenizer.decode([config["vocab_size"] - 1])
    assert config["num_attention_heads"] % 2 == 0


def test_a_draft_fits_its_target(tmp_path: pathlib.Path) -> None:
    main([str(tmp_path / "t"), "--shape", "dense-tiny"])
    assert main([str(tmp_path / "d"), "--draft-for", str(tmp_path / "t")]) == 0
    target, draft = (json.loads((tmp_path / name / "config.json").read_text()) for name in "td")
    assert draft["architectures"] == ["DFlashDraftModel"] and draft["hidden_size"] == target["hidden_size"]
    layers = draft["dflash_config"]["target_layer_ids"]
    assert draft["num_target_layers"] == target["num_hidden_layers"] and max(layers) <= target["num_hidden_layers"]
    assert (tmp_path / "t/tokenizer.json").read_text() == (tmp_path / "d/tokenizer.json").read_text()


def test_a_draft_without_a_target_says_what_to_do(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "d"), "--draft-for", str(tmp_path / "none")]) == 2
    assert "make the target first" in capsys.readouterr().err
