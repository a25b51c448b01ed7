"""Frozen values shared by all modules: measurements, crashes, scores, and our own errors.

    plain = msgspec.to_builtins(measurement)      # for JSON; unknown fields are absent
    validation.from_json(plain, Outcome)          # the same Measurement

A configuration's failure is a value (`Crash`); our own failure is an exception (`AutotuneError`).
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Annotated

import msgspec

Value = str | int | float | bool
# One choice per active parameter. A parameter whose `when` does not hold is absent.
Config = Mapping[str, Value]
# Numbers of stored values: finite, and small enough that sums and products of a few stay finite.
Number = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300, description="a finite number")]
Count = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1, description="a whole number")]


# Percentiles of a latency by name, and the figures that are known of each latency.
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
STATISTICS = (*QUANTILES, "mean")


class AutotuneError(Exception):
    """Our own failure. The message is one line and says what to do. Exit code 1."""

    exit_code = 1


class UsageError(AutotuneError):
    """Bad command line, space or setting. Exit code 2."""

    exit_code = 2


class NothingFeasible(AutotuneError):
    """The study ended without any feasible configuration. Exit code 3."""

    exit_code = 3


class HostCannotRun(AutotuneError):
    """This host lacks something that the space or engine needs. Exit code 4."""

    exit_code = 4


class Stage(enum.StrEnum):
    """Progress of a launch. The order of definition is the order in time."""

    ARG_PARSE = "arg-parse"
    IMPORT = "import"
    DEVICE_INIT = "device-init"
    NCCL_INIT = "nccl-init"
    LOAD = "load"
    KV_ALLOC = "kv-alloc"
    GRAPH_CAPTURE = "graph-capture"
    WARMUP = "warmup"
    SERVING = "serving"

    @classmethod
    def parse(cls, text: str) -> Stage:
        """Read a stage name; underscores count as hyphens. Raises ValueError for other words."""
        try:
            return cls(text.strip().lower().replace("_", "-"))
        except ValueError:
            raise ValueError(f"{text!r} is not a stage ({', '.join(cls)})") from None


class Blame(enum.StrEnum):
    """Cause of a crash, which decides what the tuner does next."""

    CONFIG = "config"  # this configuration fails always
    ENVIRONMENT = "environment"  # this host or installation, for every configuration or all that use a feature
    TRANSIENT = "transient"  # may well work next time
    UNKNOWN = "unknown"


class Crash(msgspec.Struct, frozen=True, omit_defaults=True, tag="crash"):
    """A launch, or a load run on it, that gave no measurement.

    `signature` is short and stable: the same fault on other ranks, pids, addresses, times and paths
    gives the same one. `exit_status` is the server's return code (negative: killed by that signal),
    None while it still runs or is unknown. `after_s` counts from the start of the launch.
    `blame_why`: grounds of the blame. `blame_also`: other blames that the log leaves open. `engine`: the one that wrote
    the log (sglang, vllm, tensorrt_llm, llama.cpp), "" if unknown.
    """

    category: str
    stage: Stage
    blame: Blame
    signature: str
    excerpt: str
    explanation: str = ""
    next_step: str = ""
    exit_status: Count | None = None
    after_s: Number | None = None
    blame_why: str = ""
    blame_also: tuple[Blame, ...] = ()
    engine: str = ""


class Percentiles(msgspec.Struct, frozen=True, omit_defaults=True):
    """Percentiles of a latency in milliseconds over the `n` requests of a window.

    `errors`: standard error of each figure, as a share of it, by name; none from a single request.
    """

    p50: Number
    p90: Number
    p99: Number
    mean: Number
    n: Count | None = None
    p95: Number | None = None
    errors: Mapping[str, Number] = {}


class Energy(msgspec.Struct, frozen=True, omit_defaults=True):
    """Energy of a server's devices over a window.

    `joules` is None when nothing was measured; it is never 0 for want of a meter. `source` names the
    meter (`nvml`, `rapl`, `cpu_time`, `none`); `assumed` is True when a configured constant and not a
    sensor gave the watts. `reasons` are validity codes; an Energy with reasons is not valid.
    `cross_check_j` is the integral of sampled power over the same window, where there is one.
    """

    source: str
    joules: Number | None
    window_s: Number
    assumed: bool = False
    reasons: tuple[str, ...] = ()
    per_device_j: Mapping[str, Number] = {}
    scope: str | None = None
    cross_check_j: Number | None = None
    temperature_c: Mapping[str, tuple[Number, Number]] = {}
    power_limit_w: Mapping[str, Number] = {}

    @property
    def valid(self) -> bool:
        return self.joules is not None and not self.reasons

    @property
    def watts(self) -> float | None:
        """Mean power over the window in W; None when nothing was measured."""
        return _ratio(self.joules, self.window_s)


class Measurement(msgspec.Struct, frozen=True, omit_defaults=True, tag="measurement"):
    """Figures of one steady window on a live server.

    `output_tokens` are tokens produced inside the window, counted from the server's usage.
    `requests` ended well inside the window, `errors` did not; `reasons` are validity codes of the
    window itself (empty: valid). `accept_length` is completion tokens over verify steps, None without
    speculation. `relative_error` is the half-width of the 95 % interval of the objective, as a share. `short`: how
    short the server was of a resource, 0..1.
    """

    output_tokens: Count
    window_s: Annotated[float, msgspec.Meta(gt=1e-9, le=1e300, description="a number above 0")]
    requests: Count
    errors: Count
    concurrency: Count | None
    energy: Energy
    ttft_ms: Percentiles | None = None
    tpot_ms: Percentiles | None = None
    itl_ms: Percentiles | None = None
    e2e_ms: Percentiles | None = None
    prompt_tokens: Count | None = None
    accept_length: Number | None = None
    relative_error: Number | None = None
    output_agreement: Number | None = None
    reasons: tuple[str, ...] = ()
    error_kinds: Mapping[str, Count] = {}
    client_cpu_share: Number | None = None
    good_tokens: Count | None = None
    short: Mapping[str, Number] = {}

    @property
    def valid(self) -> bool:
        """True if the window (apart from its energy) may be compared with others."""
        return not self.reasons

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.window_s

    @property
    def tokens_per_j(self) -> float | None:
        """Output tokens per joule, the same as throughput per watt; None without an energy reading."""
        return _ratio(self.output_tokens, self.energy.joules)

    @property
    def error_rate(self) -> float | None:
        """Share of failed requests; None without any request."""
        return _ratio(self.errors, self.requests + self.errors)


class Score(msgspec.Struct, frozen=True, omit_defaults=True):
    """Objective value of a measurement, and the share of each limit that it uses (measured / limit).

    A ratio above 1 breaks its limit. `ratio_errors`: standard errors of ratios, where known. `value` is None when the
    objective was not measured. A score with `reasons` (validity codes) must not be compared with others.
    """

    value: Number | None
    ratios: Mapping[str, Number] = {}
    reasons: tuple[str, ...] = ()
    ratio_errors: Mapping[str, Number] = {}

    @property
    def violated(self) -> tuple[str, ...]:
        return tuple(name for name, ratio in self.ratios.items() if ratio > 1)

    @property
    def feasible(self) -> bool:
        return self.value is not None and not self.reasons and not self.violated


Outcome = Measurement | Crash


def _ratio(of: float | None, by: float | None) -> float | None:
    """A quotient; None when a part is unknown, the divisor is not above 0, or the result is not finite."""
    if of is None or by is None or by <= 0:
        return None
    return found if math.isfinite(found := of / by) else None


def exact(value: Value | None) -> tuple[bool, Value | None]:
    """A key that distinguishes True from 1."""
    return isinstance(value, bool), value


def config_key(config: Config) -> str:
    """A canonical text for a configuration, independent of the order of its choices."""
    return json.dumps(dict(config), sort_keys=True, separators=(",", ":"))


def canonical(value: object) -> str:
    """A canonical text for a YAML or JSON value, independent of the order of keys.

    Keys of several types (`auto` beside `true`) are compared by their JSON spelling. Other types become `str`.
    """
    return json.dumps(_keys_spelled(value), sort_keys=True, default=str)


def _keys_spelled(value: object) -> object:
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else json.dumps(key, default=str): _keys_spelled(of)
                for key, of in value.items()}
    return [_keys_spelled(item) for item in value] if isinstance(value, list | tuple) else value


def digest(text: str, length: int = 12) -> str:
    """A short stable hash, for names and identities (not for secrets)."""
    return hashlib.sha256(text.encode()).hexdigest()[:length]
