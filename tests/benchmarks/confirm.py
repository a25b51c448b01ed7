"""Simulated confirmations with known truth: false winners, power, bad blocks, interruptions, coverage.

    python -m tests.benchmarks.confirm [--json] [--studies 2000] [--only WORD]

Every study runs the product's own `measure.finalists.Confirmation` on simulated launches. One line a case: what was
found, what is asked for, and whether it holds; exit 1 if any case fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence

import yaml

from autotune.config.compose import data_folder
from autotune.measure.finalists import BASELINE, Block, Confirmation, ConfirmSettings, Decision, Finalist

SETTINGS = ConfirmSettings(**yaml.safe_load((data_folder("conf") / "study" / "default.yaml").read_text())["confirm"])
LOAD, OTHER, LOAD_ONLY = "load 4", "load 16", "load-0"
NOISE = 0.01
Noise = Callable[[random.Random], Callable[[str], float]]  # a study's source of errors (log), by server


def equal(rng: random.Random) -> Callable[[str], float]:
    return lambda key: rng.gauss(0, NOISE)


def louder(*keys: str) -> Noise:
    """Four times the noise for some servers."""
    return lambda rng: lambda key: rng.gauss(0, NOISE * (4 if key in keys else 1))


def drift(rng: random.Random) -> Callable[[str], float]:
    """5 % over twenty blocks."""
    done = iter(range(10**9))
    return lambda key: rng.gauss(0, NOISE) + 0.05 * next(done) / 20


def correlated(rng: random.Random) -> Callable[[str], float]:
    """A first-order autoregression of 0.8 from block to block."""
    last = [rng.gauss(0, NOISE / 0.6)]

    def error(key: str) -> float:
        last[0] = 0.8 * last[0] + rng.gauss(0, NOISE)
        return last[0]
    return error


def heavy(rng: random.Random) -> Callable[[str], float]:
    """Student's t with 2.5 degrees of freedom."""
    return lambda key: NOISE * rng.gauss(0, 1) / math.sqrt(rng.gammavariate(1.25, 2) / 2.5)


def step(rng: random.Random) -> Callable[[str], float]:
    """5 % from a random block on."""
    done, at = iter(range(10**9)), rng.randrange(20)
    return lambda key: rng.gauss(0, NOISE) + (0.05 if next(done) >= at else 0.0)


@dataclasses.dataclass(frozen=True)
class Study:
    """A study: true log gains of the finalists' servers and of the other load, its noise, its bad blocks."""

    gains: Sequence[float]
    noise: Noise = equal
    rounds: int = SETTINGS.max_rounds
    bad: float = 0.0  # probability of a bad block of a finalist: half crashes, half broken limits
    baseline_over: bool = False
    load_gain: float | None = None  # of the other load, under which the finalists run

    def start(self) -> Confirmation:
        load = LOAD if self.load_gain is None else OTHER
        finalists = [Finalist(str(i), load) for i in range(len(self.gains))]
        if self.load_gain is not None:
            finalists.append(Finalist(LOAD_ONLY, load, own_server=False))
        return Confirmation(finalists, LOAD, dataclasses.replace(SETTINGS, finalists=len(self.gains)), self.rounds)

    def blocks(self, seed: int) -> Callable[[str], Block]:
        """A source of launches."""
        rng = random.Random(seed)
        error = self.noise(rng)

        def block(key: str) -> Block:
            gain, e = 0.0 if key == BASELINE else self.gains[int(key)], error(key)
            if key != BASELINE and rng.random() < self.bad:
                if rng.random() < 0.5:
                    return Block({}, crash=f"signature {rng.randrange(3)}")
                return Block({LOAD: 40 * math.exp(gain + e)}, {LOAD})
            values = {LOAD: 40 * math.exp(gain + e)}
            if self.load_gain is not None:
                values[OTHER] = 40 * math.exp(gain + self.load_gain + e + rng.gauss(0, NOISE / 3))
            return Block(values, {LOAD} if key == BASELINE and self.baseline_over else ())
        return block

    def run(self, seed: int) -> Decision:
        made, launch = self.start(), self.blocks(seed)
        while (slot := made.next()) is not None:
            made.add(launch(slot[1]))
        return made.decision()

    def interrupted(self, seed: int) -> tuple[Decision, Decision]:
        """(the decision of a study, and of the same one taken up from its blocks after an interruption)."""
        whole, launch, kept = self.start(), self.blocks(seed), list[Block]()
        stop, again = random.Random(seed).randrange(2 * self.rounds), self.start()
        while (slot := whole.next()) is not None:
            if len(kept) == stop:
                for block in kept:
                    again.add(block)
                assert again.next() == slot
            kept.append(launch(slot[1]))
            whole.add(kept[-1])
            if len(kept) > stop:
                again.add(kept[-1])
        return whole.decision(), again.decision() if len(kept) > stop else whole.decision()


AA = {"equal": Study([0.0]), "two finalists": Study([0.0] * 2), "five finalists": Study([0.0] * 5),
      "baseline has four times the noise": Study([0.0] * 2, louder(BASELINE)),
      "one of two has four times the noise": Study([0.0] * 2, louder("0")),
      "one of five has four times the noise": Study([0.0] * 5, louder("0")),
      "drift of 5 %": Study([0.0] * 2, drift), "AR 0.8 between blocks": Study([0.0] * 2, correlated),
      "t with 2.5 degrees of freedom": Study([0.0] * 2, heavy), "step of 5 %": Study([0.0] * 2, step),
      "another load gives 50 %": Study([0.0] * 2, load_gain=0.4),
      "another load gives nothing": Study([0.0] * 2, load_gain=0.0)}
POWER = {"one finalist in eight rounds": Study([math.log(1.03)], rounds=8),
         "two finalists in ten rounds": Study([0.0, math.log(1.03)], rounds=10)}


def cases(studies: int) -> Iterator[tuple[str, float, str, bool]]:
    """(case, value, what is asked, whether it holds) of every case."""
    for name, study in AA.items():
        true = {None} if not study.load_gain else {None, LOAD_ONLY}
        false = sum(study.run(seed).winner not in true for seed in range(studies)) / studies
        yield f"false winners: {name}", false, "at most 0.035", false <= 0.035
    for name, study in POWER.items():
        best = str(len(study.gains) - 1)
        decisions = [study.run(seed) for seed in range(studies)]
        power = sum(d.winner == best for d in decisions) / studies
        yield f"power for +3 %: {name}", power, "at least 0.95", power >= 0.95
        gains = [d.gains[best].server for d in decisions]
        covered = sum(g.low is not None and g.high is not None and g.low <= 0.03 <= g.high for g in gains) / studies
        level = decisions[0].level
        yield f"coverage at the stop: {name}", covered, f"at least {level:.2f}", covered >= level
    finalists, rounds = SETTINGS.plan(2, 14)
    reserved = Study([math.log(1.1)] + [0.0] * (finalists - 1), rounds=rounds)
    power = sum(reserved.run(seed).winner == "0" for seed in range(studies)) / studies
    yield "power for +10 % with 14 launches", power, "at least 0.95", power >= 0.95
    lost = Study([math.log(1.3)], bad=0.1)
    kept = sum(lost.run(seed).winner == "0" for seed in range(studies)) / studies
    yield "a true +30 % with 10 % bad blocks is kept", kept, "at least 0.97", kept >= 0.97
    load = Study([0.0], load_gain=math.log(1.5))
    told = sum(load.run(seed).winner == LOAD_ONLY for seed in range(studies)) / studies
    yield "a gain of the load alone is told as such", told, "at least 0.95", told >= 0.95
    over = Study([math.log(1.1)], baseline_over=True)
    decided = sum(over.run(seed).state == "confirmed" for seed in range(studies)) / studies
    yield "a baseline over its limit is decided", decided, "at least 0.99", decided >= 0.99
    tried = [Study([0.0, math.log(1.02)], bad=0.1).interrupted(seed) for seed in range(200)]
    same = sum(whole == resumed for whole, resumed in tried)
    yield "interruptions that end in the same verdict, of 200", same, "200", same == 200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--studies", type=int, default=2000)
    args = parser.parse_args()
    wrong = False
    for case, value, asked, ok in cases(args.studies):
        wrong |= not ok
        print(json.dumps({"case": case, "value": round(value, 4), "asked": asked, "ok": ok}) if args.json else
              f"{'ok   ' if ok else 'WRONG'} {case}: {value:.4g} ({asked})", flush=True)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
