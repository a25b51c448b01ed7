"""Logs in the forms that containers, journals and collectors write: the answer must stay the same.

    python -m tests.crash.wrapped ../shared/crash_cases/cases.jsonl ../shared/crash_cases/cases2.jsonl
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from collections.abc import Callable

from autotune.crash.classify import classify
from tests.crash.scores import read


def stamp(n: int) -> str:
    return f"2026-11-12T10:{n // 60 % 60:02}:{n % 60:02}.{n % 1000:03}456789Z"


def lines(log: str, form: Callable[[int, str], str], newest_first: bool = False) -> str:
    made = [form(n, line) for n, line in enumerate(log.split("\n"))]
    return "\n".join(reversed(made) if newest_first else made)


def as_json(message: str, time: str, **more: object) -> Callable[[int, str], str]:
    return lambda n, line: json.dumps({message: line, time: stamp(n), **more})


def export(n: int, line: str) -> str:
    time = 1_700_000_000_000_000 + n
    return f"__CURSOR=s=1;i={n}\n__REALTIME_TIMESTAMP={time}\n_SYSTEMD_UNIT=x.service\nMESSAGE={line}\n"


def applies(form: str, log: str) -> bool:
    """True unless the log is turned round and neither timestamps nor tracebacks show it."""
    return form != PLAIN or 'File "' in log or len(set(re.findall(r"\d\d:\d\d:\d\d", log))) > 1


PLAIN = "newest first, as it is"
SHORT = "Nov 12 10:{:02}:{:02} node-7 python3[4242]: {}"
FORMS: dict[str, Callable[[str], str]] = {
    "kubectl --prefix": lambda log: lines(log, lambda n, line: f"[pod/vllm-0/server] {line}"),
    "kubectl --timestamps": lambda log: lines(log, lambda n, line: f"{stamp(n)} {line}"),
    "kubectl --prefix --timestamps": lambda log: lines(log, lambda n, line: f"[pod/vllm-0/server] {stamp(n)} {line}"),
    "CRI file": lambda log: lines(log, lambda n, line: f"{stamp(n)} stderr F {line}"),
    "compose": lambda log: lines(log, lambda n, line: f"sglang-1  | {line}"),
    "docker json-file": lambda log: lines(log, lambda n, line: json.dumps(
        {"log": line + "\n", "stream": "stderr", "time": stamp(n)})),
    "Ray": lambda log: lines(log, lambda n, line: f"\x1b[36m(RayWorkerWrapper pid=933, ip=10.0.0.7)\x1b[0m {line}"),
    "JSON lines": lambda log: lines(log, as_json("message", "ts", level="info")),
    "JSON array": lambda log: json.dumps([{"textPayload": line, "timestamp": stamp(n)}
                                          for n, line in enumerate(log.split("\n"))], indent=2),
    "fluent bit": lambda log: lines(log, as_json("log", "time", kubernetes={
        "pod_name": "vllm-0", "container_name": "server"})),
    "journalctl": lambda log: lines(log, lambda n, line: SHORT.format(n // 60, n % 60, line)),
    "journalctl -o short-iso": lambda log: lines(log, lambda n, line: (
        f"2026-11-12T10:{n // 60:02}:{n % 60:02}+0000 node-7 python3[4242]: {line}")),
    "journalctl -o short-full": lambda log: lines(log, lambda n, line: (
        f"Thu 2026-11-12 10:{n // 60:02}:{n % 60:02} UTC node-7 python3[4242]: {line}")),
    "journalctl -o json-pretty": lambda log: lines(log, lambda n, line: json.dumps(
        {"MESSAGE": line, "__REALTIME_TIMESTAMP": str(n)}, indent=8)),
    "journalctl -o json": lambda log: lines(log, as_json("MESSAGE", "__REALTIME_TIMESTAMP", _SYSTEMD_UNIT="x.service")),
    "journalctl -o export": lambda log: lines(log, export),
    "journalctl -r": lambda log: lines(log, lambda n, line: SHORT.format(n // 60, n % 60, line), True),
    "newest first, JSON": lambda log: lines(log, as_json("message", "timestamp"), True),
    "newest first, timestamps": lambda log: lines(log, lambda n, line: f"{stamp(n)} {line}", True),
    PLAIN: lambda log: "\n".join(reversed(log.split("\n"))),
    "CRI in JSON": lambda log: lines(log, lambda n, line: json.dumps({"log": f"{stamp(n)} stderr F {line}"}))}


def changed(log: str, form: str) -> str:
    """How the answer to a wrapped log differs; empty if it is the same."""
    plain, other = classify(log), classify(FORMS[form](log))
    return "; ".join(f"{name}: {getattr(plain, name)} becomes {getattr(other, name)}"
                     for name in ("category", "blame", "stage", "signature")
                     if getattr(plain, name) != getattr(other, name))


def main() -> None:
    cases = [case for name in sys.argv[1:] for case in read(pathlib.Path(name))]
    for form in FORMS:
        of = [case for case in cases if applies(form, case["log"])]
        wrong = {case["id"]: why for case in of if (why := changed(case["log"], form))}
        print(f"{form}: {len(of) - len(wrong)} of {len(of)} the same")
        for name, why in wrong.items():
            print(f"  {name}: {why}")


if __name__ == "__main__":
    main()
