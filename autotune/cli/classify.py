"""`python -m autotune classify FILE...`: explains pasted server logs, one JSON object a line."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import TextIO

from autotune.crash.classify import classify
from autotune.crash.log import read_path, read_stream
from autotune.utils.text import REPLACED, printable


def run(paths: list[str], out: TextIO) -> int:
    """Explain each file (`-`: standard input) on `out`; 2 when one could not be read, else 0.

    The keys are file, stage, category, blame, signature, excerpt, explanation, next_step.
    """
    unread = 0
    for name in paths:
        try:
            data = read_stream(sys.stdin.buffer) if name == "-" else read_path(pathlib.Path(name))
        except OSError as error:
            print(f"classify: cannot read {name}: {error.strerror or error}", file=sys.stderr)
            unread += 1
            continue
        crash = classify(data)
        line = {"file": name, "stage": str(crash.stage), "category": crash.category, "blame": str(crash.blame),
                "signature": crash.signature, "excerpt": crash.excerpt, "explanation": crash.explanation,
                "next_step": crash.next_step}
        print(printable(json.dumps(line, ensure_ascii=False), instead=REPLACED), file=out, flush=True)
    return 2 if unread else 0
