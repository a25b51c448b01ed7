"""The roofline of a study's model on its GPUs: expected and highest decode rates of configurations."""

from __future__ import annotations

import dataclasses
import pathlib
from itertools import pairwise

import msgspec

from autotune.config.settings import Settings
from autotune.engine.command import Command, build
from autotune.engine.model import WIDTHS, ModelShape
from autotune.engine.roofline import FITTED, LIMIT, Constants, GpuLimits, limits_of, tokens_per_s
from autotune.records import Config, UsageError


@dataclasses.dataclass(frozen=True)
class Roofline:
    """`read` is the way to make one."""

    settings: Settings
    version: str | None
    shape: ModelShape
    gpu: GpuLimits

    @classmethod
    def read(cls, settings: Settings, version: str | None, gpu_name: str) -> Roofline | None:
        """None where it does not apply: no GPU with known peaks, an engine whose flags are not named, a model without a
        readable config.json, or requests that arrive at a rate of their own."""
        gpu = limits_of(gpu_name)
        if gpu is None or settings.engine.roofline is None or settings.workload.rate_per_s is not None:
            return None
        try:
            return cls(settings, version, ModelShape.read(pathlib.Path(settings.space.model.get("target", ""))), gpu)
        except UsageError:
            return None

    def tokens_per_s(self, server: Config, load: Config, constants: Constants = FITTED) -> float | None:
        """Expected output tokens per second; None for a server that the installed engine cannot express."""
        command = self._command(server)
        return None if command is None else self._rate(command, load, constants)

    def objective(self, server: Config, load: Config) -> float | None:
        """Expected objective up to a factor: the rate, or the rate per GPU where energy or money is counted."""
        command = self._command(server)
        if command is None:
            return None
        rate = self._rate(command, load, FITTED)
        return rate if self.settings.objective.name == "tokens_per_s" else rate / command.gpus

    def limit(self, config: Config) -> float | None:
        """Output tokens per second that bandwidth and arithmetic allow at most, without speculation."""
        return self.tokens_per_s(*self.settings.space.split(config), LIMIT)

    def _rate(self, command: Command, load: Config, constants: Constants) -> float:
        flags = self.settings.engine.roofline
        assert flags is not None  # checked by `read`
        of_replica = 1
        for flag in flags.model_parallel:
            of_replica *= int(_value(command, flag) or 1)
        of_replica = min(of_replica, command.gpus)
        replicas = max(1, command.gpus // of_replica)
        weights, kv = (_width(_value(command, flag)) for flag in (flags.weights, flags.kv_cache))
        shape = self.shape if weights is None else msgspec.structs.replace(self.shape, weight_bytes=weights)
        asked = self.settings.workload.load(load)
        context = asked.context_tokens + asked.workload.output_tokens / 2
        return replicas * tokens_per_s(shape, self.gpu, of_replica, max(1.0, asked.concurrency / replicas), context,
                                       kv or 2.0, constants)

    def _command(self, server: Config) -> Command | None:
        try:
            return build(self.settings.engine, self.settings.space, server, device=self.settings.device,
                         version=self.version)
        except UsageError:
            return None


def _value(command: Command, flag: str | None) -> str | None:
    """The word after a flag of a command."""
    return next((word for before, word in pairwise(command.argv) if before == flag), None)


def _width(name: str | None) -> float | None:
    """Bytes of a number in this format; None for an unknown one, which is the model's own."""
    if name is None:
        return None
    return next((width for known, width in WIDTHS.items() if known in name), None)
