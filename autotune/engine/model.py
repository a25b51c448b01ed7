"""The shape of a model, from its config.json: the one reader of that file."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import msgspec

from autotune.records import UsageError
from autotune.utils.validation import from_json

# Bytes of a weight by quantization method or dtype, with its scales. Unknown ones count as 16 bits.
WIDTHS = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "compressed-tensors": 1.0, "w8a8_int8": 1.0,
          "mxfp4": 0.53, "nvfp4": 0.56, "modelopt": 0.56, "awq": 0.56, "gptq": 0.56, "bitsandbytes": 0.56}
NESTED = ("text_config", "llm_config", "thinker_config")  # of models that also see or hear


class ModelShape(msgspec.Struct, frozen=True):
    """Layers and widths of a decoder-only transformer, dense or with experts, with grouped or latent attention (MLA).

    `experts` is 0 for a dense model. `dense_layers` is the number of layers without experts. `expert_width` and
    `width` are the inner sizes of an expert and of a dense feed-forward block. `kv_rank` is the size of MLA's latent
    with its rotary part (0: none). `weight_bytes`: bytes of one weight.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    width: int
    vocabulary: int
    experts: int = 0
    experts_of_a_token: int = 0
    expert_width: int = 0
    shared_width: int = 0
    dense_layers: int = 0
    query_rank: int = 0
    kv_rank: int = 0
    tied: bool = False
    weight_bytes: float = 2.0

    @classmethod
    def read(cls, folder: pathlib.Path) -> ModelShape:
        """The shape of the model in `folder`. Raises UsageError with one line for a file that does not tell it."""
        path = folder / "config.json"
        try:
            config = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read ({error}): is {folder} the folder of a model?") from error
        return cls.of(config, str(path))

    @classmethod
    def of(cls, config: Any, where: str = "config.json") -> ModelShape:
        """The shape that a config.json states. Raises UsageError beginning with `where`."""
        if not isinstance(config, dict):
            raise UsageError(f"{where} is not a JSON object")
        outer = config
        for name in NESTED:
            if isinstance(config.get(name), dict):
                config = {**config, **config[name]}
        layers, hidden, heads = (_count(config, where, name) for name in (
            "num_hidden_layers", "hidden_size", "num_attention_heads"))
        experts = _first(config, "num_experts", "n_routed_experts", "num_local_experts") or 0
        width = _first(config, "intermediate_size_mlp", "intermediate_size") or 4 * hidden
        expert_width = (_first(config, "moe_intermediate_size") or width if "intermediate_size_mlp" not in config
                        else _first(config, "intermediate_size") or width)
        shared = _first(config, "n_shared_experts") or (1 if "llama4" in str(config.get("model_type")) else 0)
        every = _first(config, "interleave_moe_layer_step", "decoder_sparse_step") or 1
        first = _first(config, "first_k_dense_replace") or 0
        rank = _first(config, "kv_lora_rank")
        found = {
            "layers": layers, "hidden": hidden, "heads": heads,
            "kv_heads": _first(config, "num_key_value_heads") or heads,
            "head_size": _first(config, "head_dim") or hidden // heads, "width": width,
            "vocabulary": _count(config, where, "vocab_size"), "experts": experts,
            "experts_of_a_token": _first(config, "num_experts_per_tok", "experts_per_token", "moe_topk") or 0,
            "expert_width": expert_width if experts else 0,
            "shared_width": (_first(config, "shared_expert_intermediate_size") or shared * expert_width)
            if experts else 0,
            "dense_layers": first + (layers - first) * (every - 1) // every if experts else layers,
            "query_rank": _first(config, "q_lora_rank") or 0 if rank else 0,
            "kv_rank": rank + (_first(config, "qk_rope_head_dim") or 0) if rank else 0,
            "tied": bool(config.get("tie_word_embeddings", False)), "weight_bytes": _weight_bytes(config, outer)}
        shape: ModelShape = from_json(found, cls)
        return shape

    @property
    def attention_weights(self) -> int:
        """Weights of one layer's attention."""
        queries = self.heads * self.head_size
        if not self.kv_rank:
            return self.hidden * (2 * queries + 2 * self.kv_heads * self.head_size)
        down = self.query_rank or self.hidden
        return self.hidden * (down + self.kv_rank) + down * queries + 2 * self.kv_rank * queries + queries * self.hidden

    @property
    def dense_weights(self) -> int:
        """Weights that every token uses: attention, dense and shared feed-forward blocks, and the output layer."""
        return (self.layers * self.attention_weights + 3 * self.hidden * self.width * self.dense_layers
                + 3 * self.hidden * self.shared_width * (self.layers - self.dense_layers)
                + self.hidden * self.vocabulary)

    @property
    def weights_of_experts(self) -> int:
        """Weights of all routed experts."""
        return (self.layers - self.dense_layers) * self.experts * 3 * self.hidden * self.expert_width

    @property
    def weights(self) -> int:
        return self.dense_weights + self.weights_of_experts + (0 if self.tied else self.hidden * self.vocabulary)

    def kv_values(self) -> int:
        """Numbers that the KV cache keeps for one token."""
        return self.layers * (self.kv_rank or 2 * self.kv_heads * self.head_size)


def _count(config: Mapping[str, Any], where: str, name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{where}: {name} must be a whole number above 0, not {value!r}")
    return value


def _first(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of these values that is a whole number."""
    return next((value for name in names if isinstance(value := config.get(name), int)
                 and not isinstance(value, bool)), None)


def _weight_bytes(config: Mapping[str, Any], outer: Mapping[str, Any]) -> float:
    quantization = outer.get("quantization_config") or config.get("quantization_config")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    method = str(quantization.get("quant_method") or "") if isinstance(quantization, dict) else dtype
    bits = _first(quantization, "bits", "w_bit") if isinstance(quantization, dict) else None
    return bits / 8 * 1.12 if bits and bits < 8 else WIDTHS.get(method, WIDTHS.get(dtype, 2.0))
