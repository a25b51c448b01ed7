"""User attributes of a trial under flat names, for tests that read databases by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flat(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """`attrs` and the parts of its attribute `outcome`, such as crash_stage, ttft_p99_ms, resolved, cost_s."""
    stored = attrs.get("outcome") or {}
    found = {**attrs, **stored.get("launch", {}), **{k: v for k, v in stored.items() if k.endswith("_s")}}
    found["invalid_reasons"] = stored.get("score", {}).get("reasons", []) if stored.get("score") else []
    outcome = stored.get("outcome", {})
    for name, value in outcome.items():
        if outcome["type"] == "crash":
            found[f"crash_{name}"] = value
        elif name == "energy":
            found |= {f"energy_{key}": part for key, part in value.items()}
        elif isinstance(value, dict):
            found |= {f"{name.removesuffix('_ms')}_{key}_ms": part for key, part in value.items()}
        else:
            found[name] = value
    return found
