"""Scores of the classifier on labelled logs: category, blame and stage.

    python -m tests.crash.scores ../shared/crash_cases/cases.jsonl ../shared/crash_cases/cases2.jsonl [--misses]

A label's `also` names other right categories, `blame_also` other right blames. A case without
`stage` has no such score.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.crash.classify import classify

KEYS = ("category", "blame", "stage")


def misses(case: Mapping[str, Any], also: bool = True) -> list[str]:
    """What is wrong about a case, one line for each of KEYS; empty if all is right."""
    crash, wrong = classify(case["log"]), []
    for key in KEYS:
        said, right = str(getattr(crash, key)), [case[key]] if key in case else []
        if key != "stage" and also:
            right += case.get("also" if key == "category" else f"{key}_also", [])
        if right and said not in right:
            wrong.append(f"{key}: {said}, labelled {' or '.join(right)}")
    return wrong


def score(cases: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """(right, labelled) for each of KEYS."""
    found = [(case, misses(case)) for case in cases]
    return {key: (sum(key in case and not any(m.startswith(key) for m in wrong) for case, wrong in found),
                  sum(key in case for case in cases)) for key in KEYS}


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """The cases of a file, one JSON object a line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--misses", action="store_true", help="name each wrong answer")
    options = parser.parse_args()
    for path in options.files:
        cases = read(path)
        print(f"{path.name}: {len(cases)} cases; " + ", ".join(
            f"{key} {right} of {of} ({right / of:.1%})" for key, (right, of) in score(cases).items()))
        if options.misses:
            for case in cases:
                for wrong in misses(case):
                    print(f"  {case['id']} {wrong}")


if __name__ == "__main__":
    main()
