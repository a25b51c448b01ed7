"""From a server's log, exit status and timing to a Crash: category, stage, blame, excerpt, signature.

    classify(pathlib.Path("server.log"), exit_status=-9, after_s=46.0)

The first cause wins over its echoes. What is known about failures is data (rules.yaml); this module only applies it.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence

from autotune.crash import exit_status as silent
from autotune.crash import log as logtext
from autotune.crash import rules, tracebacks
from autotune.crash.failure_stage import Stages
from autotune.crash.host_evidence import HostEvidence
from autotune.crash.signature import around, signature
from autotune.records import Blame, Crash, Stage
from autotune.utils.redact import Redactor

EXCERPT_LINES = 24
EXCERPT_FRAMES = 6
EXCERPT_WIDTH = 400
CONTEXT_LINES = 5
LAST_WORDS = 6


def classify(log: bytes | str | pathlib.Path, *, stage: Stage | None = None, exit_status: int | None = None,
             after_s: float | None = None, timed_out: bool = False, evidence: HostEvidence | None = None,
             detail: str = "") -> Crash:
    """Explain a failed launch or load run. A path is read with bounded memory, whatever its size.

    `log` is text, bytes, or the path of a log file (a missing one counts as empty). `stage` is what the caller saw;
    None infers it from the log. `exit_status` is the server's return code (negative: that signal), `timed_out` says
    that a stage's time ran out, `detail` is one line of what the caller saw (an HTTP answer, for example).
    Never raises for what is in the log.
    """
    try:
        data = logtext.read_path(log) if isinstance(log, pathlib.Path) else log
    except OSError:
        data = b""
    text = logtext.clean(data)
    if detail:
        text = logtext.Log.of([*text.lines, logtext.Line(detail)])
    return _Reading(text, rules.load(), stage, exit_status, after_s, timed_out, evidence, detail).crash()


@dataclasses.dataclass
class _Reading:
    """One log being explained."""

    log: logtext.Log
    table: rules.Table
    given: Stage | None
    exit_status: int | None
    after_s: float | None
    timed_out: bool
    evidence: HostEvidence | None
    detail: str

    def __post_init__(self) -> None:
        self.blocks = tracebacks.find(self.log.lines)
        self.stages = Stages(self.log, self.table.without_advice(self.log.lower), self.blocks, self.table.markers,
                             self.table.frames, self.given)

    def crash(self) -> Crash:
        found = self.table.find(self.log, self.blocks, self.stages.at)
        exception = self._exception()
        if (found is None or found.tier >= rules.SYMPTOM) and self._kernel_killed():
            return self._silent("host_oom_killed")
        if found is not None and found.tier < rules.ECHO and not self._only_restates(found):
            return self._told(found)
        if self.timed_out:
            return self._silent("hang")
        if exception is not None:
            return self._unclassified(exception)
        if found is not None and (found.tier == rules.ECHO or self._failed()):
            return self._told(found)
        return self._silent(silent.category_of(self.exit_status, self._reached(), self.evidence, not self.log.lines,
                                               self.detail))

    def _only_restates(self, found: rules.Found) -> bool:
        """Whether a match only says that a launch which timed out was slow."""
        return self.timed_out and found.rule.category in ("watchdog_hang", "http_server_error")

    def _failed(self) -> bool:
        """Whether there was a failure at all, as far as is known without an error in the log."""
        return self.exit_status is not None or bool(self.detail) or self.stages.reached is not Stage.SERVING

    def _told(self, found: rules.Found) -> Crash:
        """A failure that the table knows."""
        stage = self.stages.at(found.line) or found.rule.stage or Stage.LOAD
        block = self._block_at(found.line)
        if block is not None and block.at == found.line:
            kind, message, frames = block.type, block.message or block.code, block.frames
        else:
            kind, frames, message = "", (), self.log.lines[found.line].text
            exception = tracebacks.EXCEPTION.match(message)
            if exception:
                kind, message = exception["type"], exception["message"] or ""
        name = self._signature(stage, kind, message, frames, found.text)
        return self._crash(found.rule, found.rule.category, stage, name, self._excerpt(found.line, block))

    def _unclassified(self, block: tracebacks.Block) -> Crash:
        """An exception that the table does not know."""
        rule = self.table.silent["unclassified_exception"]
        at = block.last if block.at is None else block.at
        stage = self.stages.at(at) or (Stage.LOAD if block.frames else Stage.ARG_PARSE)
        return self._crash(rule, rule.category, stage,
                           self._signature(stage, block.type, block.message or block.code, block.frames),
                           self._excerpt(at, block))

    def _silent(self, category: str) -> Crash:
        """A failure without words."""
        rule = self.table.silent.get(category) or next(r for r in self.table.rules if r.category == category)
        stage = self._reached() or rule.stage or Stage.ARG_PARSE
        name = silent.hang_category(stage) if category == "hang" else category
        words = silent.told(self.exit_status, self.after_s, self.timed_out, stage, self.evidence)
        last = [line.text[:EXCERPT_WIDTH] for line in self.log.lines[-LAST_WORDS:]]
        ending = silent.signal_of(self.exit_status)
        kind = silent.signal_name(ending) if ending is not None else ""
        return self._crash(rule, name, stage, signature(stage, kind, name), "\n".join([*last, f"[{words}]"]))

    def _crash(self, rule: rules.Rule, category: str, stage: Stage, name: str, excerpt: str) -> Crash:
        return Crash(category=category, stage=stage, blame=Blame(rule.blame_at(stage)), signature=name,
                     excerpt=Redactor.from_command((), os.environ).text(excerpt),
                     explanation=rule.explanation, next_step=rule.next_step,
                     exit_status=self.exit_status, after_s=self.after_s)

    def _signature(self, stage: Stage, kind: str, message: str, frames: Sequence[tuple[str, str]],
                   matched: str = "") -> str:
        message = self.table.without_advice(message.lower()).replace("\0", "")
        return signature(stage, kind, around(message, matched), frames)

    def _reached(self) -> Stage | None:
        return self.given or self.stages.reached

    def _kernel_killed(self) -> bool:
        """Whether the kernel ended the server: its status says SIGKILL (or nothing) and the kernel tells of a kill."""
        sigkill = silent.signal_of(self.exit_status) in (9, None) and self.exit_status != 0
        return self.evidence is not None and self.evidence.oom_killed and sigkill

    def _exception(self) -> tracebacks.Block | None:
        """The first exception that is not told by the way and not about another process; one with frames if any."""
        text = self.table.without_advice(self.log.lower)
        own = [b for b in self.blocks if b.at is not None and self.log.lines[b.at].level not in ("info", "warning")
               and not self.table.only_echoes(self._slice(text, b.at, b.last))]
        return next((b for b in own if b.frames), own[0] if own else None)

    def _slice(self, text: str, first: int, last: int) -> str:
        end = self.log.start[last + 1] if last + 1 < len(self.log.lines) else len(text)
        return text[self.log.start[first]:end]

    def _block_at(self, line: int) -> tracebacks.Block | None:
        inside = [b for b in self.blocks if b.first <= line <= b.last]
        return min(inside, key=lambda b: b.last - b.first) if inside else None

    def _excerpt(self, line: int, block: tracebacks.Block | None) -> str:
        """The lines that show the cause: the end of its traceback, or what stands around it."""
        lines = self.log.lines
        if block is not None and block.frames:
            frames = [i for i in range(block.first, (block.at or block.last) + 1)
                      if tracebacks.FRAME.match(lines[i].text)]
            first = frames[-EXCERPT_FRAMES] if len(frames) > EXCERPT_FRAMES else block.first
            chosen = list(range(first, block.last + 1))
            if first > block.first:
                chosen.insert(0, block.first)
            if line not in chosen:
                chosen = sorted({*chosen, line})
        else:
            chosen = list(range(max(0, line - CONTEXT_LINES), min(len(lines), line + CONTEXT_LINES + 1)))
        if len(chosen) > EXCERPT_LINES:
            keep = EXCERPT_LINES // 2
            chosen = sorted({*chosen[:1], *(i for i in chosen if abs(i - line) <= keep)})
        return "\n".join(_shown(lines[i]) for i in chosen if not tracebacks.MARKS.match(lines[i].text))


def _shown(line: logtext.Line) -> str:
    text = line.text if len(line.text) <= EXCERPT_WIDTH else line.text[:EXCERPT_WIDTH] + " ..."
    writer = f"[{line.writer}] " if line.writer else ""
    return f"{writer}{text}" + (f"   [{line.repeats} such lines]" if line.repeats > 1 else "")
