"""The kill campaign: SIGKILL the tuner at random moments of a running study, again and again, until it has ended.

    python -m tests.benchmarks.kills [--engine ddtree|standin] [--kills 200] [--minutes M] [--seed 0] [--json FILE]

Half of the kills come at a random time after the start, half within 60 ms after the tuner said that something began or
ended (a stage, a window, a trial), so that launches, warm-ups, windows and database writes are all hit. After each
kill the same command is run again. Checked: after the next start no process of a dead tuner lives; every file under
its final name is whole; a finished trial stays as it was; no configuration is measured twice; the study ends with
0 and a launch script, like one that nobody killed. Prints the figures; exit 1 if any of them is not 0.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import random
import sys
import tempfile
import time
from typing import Any

from tests.benchmarks.campaign import CONFIRM, Site, Trial, alive, end, space, standin

CHOICES: dict[str, dict[str, list[Any]]] = {
    "ddtree": {"tree_budget": [0, 8], "allreduce_fusion": [False, True], "concurrency": [1, 4]},
    "standin": {"speed": [100, 200], "fault": ["none", "exit"], "at": ["load"], "concurrency": [1, 4]}}
# A random kill comes at most so long after the start.
LATEST_S = {"ddtree": 15.0, "standin": 6.0}
GONE_S = 15.0


WRONG = ("orphans", "torn", "lost", "doubled", "wrong_ends")


class Campaign:
    def __init__(self, engine: str, seed: int, work: pathlib.Path) -> None:
        self.engine, self.rng, self.work = engine, random.Random(seed), work
        self.figures = dict.fromkeys(("kills", "studies", *WRONG, "trials", "failed"), 0)
        self.slowest_s = 0.0  # until the last process of a killed tuner was gone
        self.at: collections.Counter[str] = collections.Counter()  # moments of the kills

    @property
    def right(self) -> bool:
        return not any(self.figures[kind] for kind in WRONG)

    def line(self) -> str:
        f = self.figures
        return (f"{f['kills']} kills in {f['studies']} studies, {f['orphans']} orphans, {f['lost']} lost, "
                f"{f['doubled']} doubled, {f['torn']} torn files, {f['wrong_ends']} wrong ends "
                f"({f['trials']} trials told, {f['failed']} were running when killed; "
                f"the last process of a killed tuner was gone after at most {self.slowest_s:.1f} s)")

    def study(self, kills: int, until: float) -> None:
        """One study, killed until it has ended (or the kills are used up: then it is let run to its end)."""
        site = Site.make(self.work / f"{self.figures['studies']:03d}",
                         space(self.engine, CHOICES[self.engine], server={"ready_poll_s": 0.1}, power={"others": 1.0},
                               study={"confirm": CONFIRM, "launches": 12}),
                         standin({}) if self.engine == "standin" else None)
        kept: dict[int, Trial] = {}
        self.figures["studies"] += 1
        while True:
            done = self.figures["kills"] >= kills or time.monotonic() > until
            before = set(site.processes())
            tuner = site.start()
            moment = None if done else self.wait_for_moment(site, tuner)
            if moment is None:
                code = tuner.wait()
                break
            tuner.kill()
            tuner.wait()
            self.figures["kills"] += 1
            self.at[moment] += 1
            self.check(site, before, kept)
            print(f"kill {self.figures['kills']}: {moment}; {len(kept)} trials kept; so far {self.line()}", flush=True)
        self.check(site, set(), kept)
        self.end_of(site, code)
        end(site, tuner)

    def wait_for_moment(self, site: Site, tuner: Any) -> str | None:
        """Wait for the moment of the next kill and name it; None when the study ended before."""
        began, said = time.monotonic(), len(site.said())
        marks = self.rng.choice([0, 0, *range(1, 14)])
        after = self.rng.uniform(0.0, LATEST_S[self.engine])
        while tuner.poll() is None:
            lines = site.said()[said:].splitlines()
            if marks and len(lines) >= marks:
                time.sleep(self.rng.uniform(0.0, 0.06))
                return "after " + " ".join(lines[marks - 1].split()[:7])[:60]
            if not marks and time.monotonic() - began >= after:
                return f"{lines[-1].strip()[:50] if lines else 'start'} (at a random time)"
            if marks and time.monotonic() - began > 4 * LATEST_S[self.engine]:
                marks, after = 0, 0.0
            time.sleep(0.005)
        return None

    def wrong(self, kind: str, count: int, site: Site, text: object) -> None:
        """Count something that must not happen, and print it."""
        if count:
            self.figures[kind] += count
            print(f"{kind.upper().replace('_', ' ')} in {site.folder}: {text}", flush=True)

    def check(self, site: Site, before: set[int], kept: dict[int, Trial]) -> None:
        """What has to hold after a kill."""
        left, took = site.settled(GONE_S)
        self.slowest_s = max(self.slowest_s, took)
        stale = {pid for pid in before if alive(pid)}
        self.wrong("orphans", len(left.keys() | stale), site, f"{left} {stale}")
        torn = site.torn()
        self.wrong("torn", len(torn), site, torn)
        trials = {t.number: t for t in site.trials()}
        for number, trial in kept.items():
            now = trials.get(number)
            same = now is not None and (now.state, now.value, now.params) == (trial.state, trial.value, trial.params)
            self.wrong("lost", not same, site, f"trial {number} was {trial.state}, is {now and now.state}")
        kept.update({t.number: t for t in trials.values() if t.finished})

    def end_of(self, site: Site, code: int) -> None:
        """How the study ended, against what one that nobody killed ends with."""
        trials = site.trials()
        self.figures["trials"] += sum(t.finished for t in trials)
        self.figures["failed"] += sum(t.state == "FAIL" for t in trials)
        complete = [t for t in trials if t.state == "COMPLETE" and not t.attrs.get("confirm")]
        searched: dict[str, set[Any]] = collections.defaultdict(set)  # measured again within a launch: for its noise
        for trial in complete:
            searched[trial.key].add(trial.attrs["launch_id"])
        again = {key: sorted(launches) for key, launches in searched.items() if len(launches) > 1}
        self.wrong("doubled", sum(len(launches) - 1 for launches in again.values()), site, again)
        well = {t.state for t in trials} <= {"COMPLETE", "PRUNED", "FAIL"} and any(t.finished for t in trials) and \
            code == (0 if complete else 3) and (code != 0 or (site.study / "launch.sh").exists())
        self.wrong("wrong_ends", not well, site, f"exit {code}, {len(searched)} configurations, states "
                   f"{collections.Counter(t.state for t in trials)}; {site.said()[-300:]!r}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=tuple(CHOICES), default="ddtree")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=600.0, help="stop killing after this long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--work", type=pathlib.Path, help="keep the studies here")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        campaign = Campaign(options.engine, options.seed, options.work or pathlib.Path(scratch))
        while campaign.figures["kills"] < options.kills and time.monotonic() - began < 60 * options.minutes:
            campaign.study(options.kills, began + 60 * options.minutes)
    for moment, count in campaign.at.most_common():
        print(f"  {count:4} {moment}")
    if options.json:
        options.json.write_text(json.dumps({**campaign.figures, "slowest_s": campaign.slowest_s, "at": campaign.at},
                                           indent=1) + "\n")
    print(f"{options.engine}: {campaign.line()}; {time.monotonic() - began:.0f} s: "
          f"{'all right' if campaign.right else 'WRONG'}")
    return 0 if campaign.right else 1


if __name__ == "__main__":
    sys.exit(main())
