"""Frozen values that every other module speaks: outcomes, measurements, crashes, and our own errors.

A configuration's failure is a value (`Crash`); our own failure is an exception (`AutotuneError`).
This module knows no library and no behaviour beyond arithmetic on its own fields.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Mapping

Value = str | int | float | bool
Config = Mapping[str, Value]
"""One choice per active parameter. A parameter whose `when` does not hold is absent."""


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
    """How far a launch got. The order of definition is the order in time."""

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
        return cls(text.strip().lower().replace("_", "-"))


class Blame(enum.StrEnum):
    """Whose fault a crash is, which decides what the tuner does next."""

    CONFIG = "config"  # this configuration fails always
    ENVIRONMENT = "environment"  # this host or installation, for every configuration or all that use a feature
    TRANSIENT = "transient"  # may well work next time
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class Crash:
    """Why a launch, or a load run on it, gave no measurement.

    `signature` is short and stable: the same fault on other ranks, pids, addresses, times and paths
    gives the same one. `exit_status` is the server's return code (negative: killed by that signal),
    None while it still runs or is unknown. `after_s` counts from the start of the launch.
    """

    category: str
    stage: Stage
    blame: Blame
    signature: str
    excerpt: str
    explanation: str = ""
    next_step: str = ""
    exit_status: int | None = None
    after_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Percentiles:
    """Percentiles of a latency in milliseconds over the requests of a window; `n` samples."""

    p50: float
    p90: float
    p99: float
    mean: float
    n: int


@dataclasses.dataclass(frozen=True)
class Energy:
    """Energy of a server's devices over a window.

    `joules` is None when nothing was measured; it is never 0 for want of a meter. `source` names the
    meter (`nvml`, `rapl`, `cpu_time`, `none`); `assumed` is True when a configured constant and not a
    sensor gave the watts. `reasons` are validity codes; an Energy with reasons is not valid.
    `cross_check_j` is the integral of sampled power over the same window, where there is one.
    """

    source: str
    joules: float | None
    window_s: float
    assumed: bool = False
    reasons: tuple[str, ...] = ()
    per_device_j: Mapping[str, float] = dataclasses.field(default_factory=dict)
    scope: str | None = None
    cross_check_j: float | None = None
    temperature_c: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    power_limit_w: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def valid(self) -> bool:
        return self.joules is not None and not self.reasons

    @property
    def watts(self) -> float | None:
        """Mean power over the window in W; None when nothing was measured."""
        if self.joules is None or self.window_s <= 0:
            return None
        return self.joules / self.window_s


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one steady window on a live server gave.

    `output_tokens` are tokens produced inside the window, counted from the server's usage.
    `requests` ended well inside the window, `errors` did not; `reasons` are validity codes of the
    window itself (empty: valid). `accept_length` is completion tokens over verify steps, None without
    speculation. `relative_error` is the half-width of the 95 % interval of the objective, as a share.
    """

    output_tokens: int
    window_s: float
    requests: int
    errors: int
    concurrency: int
    energy: Energy
    ttft_ms: Percentiles | None = None
    tpot_ms: Percentiles | None = None
    itl_ms: Percentiles | None = None
    e2e_ms: Percentiles | None = None
    prompt_tokens: int | None = None
    accept_length: float | None = None
    relative_error: float | None = None
    output_agreement: float | None = None
    reasons: tuple[str, ...] = ()
    error_kinds: Mapping[str, int] = dataclasses.field(default_factory=dict)
    client_cpu_share: float | None = None
    good_tokens: int | None = None

    @property
    def valid(self) -> bool:
        """Whether the window (not the energy) may be compared with others."""
        return not self.reasons

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.window_s

    @property
    def tokens_per_j(self) -> float | None:
        """Output tokens per joule, the same as throughput per watt; None without an energy reading."""
        if self.energy.joules is None or self.energy.joules <= 0:
            return None
        return self.output_tokens / self.energy.joules


Outcome = Measurement | Crash


def config_key(config: Config) -> str:
    """A canonical text for a configuration: equal for equal choices, whatever their order."""
    return json.dumps(dict(sorted(config.items())), sort_keys=True, separators=(",", ":"))


def canonical(value: object) -> str:
    """A canonical text for what YAML or JSON can hold: the same whatever the order of keys.

    YAML's keys need not be of one type (a choice `auto` beside `true`) and then have no order: they are spelled as JSON
    spells them first. What JSON does not know is given as `str` gives it.
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
