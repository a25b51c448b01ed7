"""The sizes of a target and its draft, as written in a model directory's config.json."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shape:
    """Sizes of one target and one draft; every length is in elements, every position in tokens."""

    vocab_size: int
    width: int  # of the residual stream
    heads: int
    hidden: int  # inner width of a target MLP
    layers: int
    taps: tuple[int, ...]  # the draft reads the residual stream after these target layers, counted from 1
    draft_layers: int
    draft_hidden: int
    block: int  # positions of one draft pass: the last token and block - 1 masks
    max_position: int
    rope_base: float
    eos: int

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @classmethod
    def load(cls, directory: Path) -> "Shape":
        """Reads config.json. Raises OSError when it is not there, ValueError or TypeError when it is no shape."""
        fields = json.loads((directory / "config.json").read_text())
        return cls(**{**fields, "taps": tuple(fields["taps"])})

    def save(self, directory: Path) -> None:
        (directory / "config.json").write_text(json.dumps(asdict(self), indent=1) + "\n")
