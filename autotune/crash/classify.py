"""Classification of a failed server: log, exit status and timing become a Crash.

The first cause wins over its echoes. rules.yaml holds the known failures; this module applies them.
"""

from __future__ import annotations

import bisect
import functools
import os
import pathlib
import re
from collections.abc import Sequence

from autotune.crash import rules
from autotune.crash.exit_status import HostEvidence, describe, signal_name, signal_of, silent_category
from autotune.crash.log import AMD, EXCEPTION, FRAME, MARKS, Block, Line, Log, clean, folded, tracebacks
from autotune.crash.signature import around, signature
from autotune.crash.source import read_path
from autotune.records import Crash, Stage
from autotune.utils.redact import Redactor

STAGES = list(Stage)
EXCERPT_LINES, EXCERPT_FRAMES, EXCERPT_WIDTH = 24, 6, 400
CONTEXT_LINES, LAST_LINES = 5, 6  # around a line without a traceback; at the end of a log without an error
ERROR_LINE = re.compile(
    r"(?:[\w.:/-]+ {1,4}){0,3}?(?:fatal )?error\b[: ]|(?:\w+ +)?(?:[\w.-]+: ){1,2}failed to \w", re.I)
AFTER, BEFORE = 40, 30  # largest distance of a traceback from a line that it explains (lines)


def classify(log: bytes | str | pathlib.Path, *, stage: Stage | None = None, exit_status: int | None = None,
             after_s: float | None = None, timed_out: bool = False, evidence: HostEvidence | None = None,
             detail: str = "") -> Crash:
    """Explain a failed launch or load run. A path is read with bounded memory, whatever its size.

    `log`: text, bytes, or the path of a log file (a missing file counts as empty). `stage`: the stage that the caller
    observed; None infers it from the log. `exit_status`: the return code, negative for a signal. `timed_out`: a stage
    exceeded its limit. `detail`: one line from the caller, such as an HTTP answer. Never raises for the log's content.
    """
    try:
        data = read_path(log) if isinstance(log, pathlib.Path) else log
    except OSError:
        data = b""
    text = clean(data)
    if detail:
        text = Log.of([*text.lines, Line(detail)], text.engine)
    return _Reading(text, stage, exit_status, after_s, timed_out, evidence, detail).crash()


class _Reading:
    """Classification of one log."""

    def __init__(self, log: Log, given: Stage | None, exit_status: int | None, after_s: float | None, timed_out: bool,
                 evidence: HostEvidence | None, detail: str) -> None:
        self.log, self.table, self.blocks = log, rules.load(), tracebacks(log.lines)
        self.given, self.exit_status, self.after_s, self.timed_out = given, exit_status, after_s, timed_out
        self.evidence, self.detail = evidence, detail
        self.text = self.table.without_advice(log.lower)
        progress = next((stage for stage, pattern in self.table.markers if pattern.search(self.text)), None)
        if progress is Stage.WARMUP and "application startup complete" in self.text and "vllm" in self.text:
            progress = Stage.SERVING  # vLLM warms up before this line, SGLang after it
        ready = max((match.start() for match in self.table.ready.finditer(self.text)), default=0)
        self.ready = max(0, bisect.bisect_right(log.start, ready) - 1)  # line: the server outlived what stands above
        self.progress, self.reached = progress, given or progress
        self.stage_at = functools.cache(self._stage_at)

    def crash(self) -> Crash:
        found = self.table.find(self.log, self.text, self.blocks, self.stage_at, self.ready)
        ended = found is not None or self.timed_out or bool(self.detail) or self.exit_status is not None
        if ended and (found is None or found.tier >= rules.END):  # the cause may stand above the ready line
            earlier = self.table.find(self.log, self.text, self.blocks, self.stage_at)
            found = earlier if earlier is not None and earlier.tier < rules.ASIDE else found
        exception = self._exception(0 if ended else self.ready)
        killed = signal_of(self.exit_status) in (9, None) and self.exit_status != 0
        if killed and self.evidence is not None and self.evidence.oom_killed and (
                found is None or found.tier >= rules.SYMPTOM):
            return self._silent("host_oom_killed")
        restating = ("watchdog_hang", "http_server_error") if self.timed_out else ()
        late = (found is not None and found.tier == rules.END and exception is not None
                and self._line(exception) < found.line)
        if found is not None and found.tier < rules.ECHO and found.rule.category not in restating and not late:
            return self._known(found)
        if self.timed_out:
            return self._silent("hang")
        if exception is not None:
            return self._unclassified(exception)
        failed = self.exit_status is not None or self.detail or self.progress is not Stage.SERVING  # besides the log
        if found is not None and (found.tier == rules.ECHO or failed):
            return self._known(found)
        if failed and signal_of(self.exit_status) is None and (line := self._error_line()) is not None:
            return self._unclassified(Block(line, line, at=line, message=self.log.lines[line].text))
        return self._silent(silent_category(self.exit_status, self.reached, self.evidence, not self.log.lines,
                                            self.detail))

    def _known(self, found: rules.Found) -> Crash:
        """Crash of a rule that matches."""
        implied = self.stage_at(found.line)
        stage = implied or found.rule.stage or Stage.LOAD
        block = next(iter(self._inside(found.line)), None)
        if block is not None and block.at == found.line:
            kind, message, frames = block.type, block.message or block.code, block.frames
        else:
            kind, frames, message = "", (), self.log.lines[found.line].text
            if exception := EXCEPTION.match(message):
                kind, message = exception["type"], exception["message"] or ""
        return self._crash(found.rule, found.rule.category, stage, self._excerpt(found.line, block), kind, message,
                           frames, found.text, assumed=implied is None)

    def _unclassified(self, block: Block) -> Crash:
        """Crash of an exception without a rule."""
        rule = self.table.silent["unclassified_exception"]
        at = self._line(block)
        stage = self.stage_at(at) or (Stage.LOAD if block.frames else Stage.ARG_PARSE)
        return self._crash(rule, rule.category, stage, self._excerpt(at, block), block.type,
                           block.message or block.code, block.frames)

    def _silent(self, category: str) -> Crash:
        """Crash of a log without an error."""
        rule = self.table.silent.get(category) or next(r for r in self.table.rules if r.category == category)
        stage = self.reached or rule.stage or Stage.ARG_PARSE
        name = f"hang_{stage.value.replace('-', '_')}" if category == "hang" else category
        words = describe(self.exit_status, self.after_s, self.timed_out, stage, self.evidence)
        last = [line.text[:EXCERPT_WIDTH] for line in self.log.lines[-LAST_LINES:]]
        ending = signal_of(self.exit_status)
        kind = signal_name(ending) if ending is not None else ""
        return self._crash(rule, name, stage, "\n".join([*last, f"[{words}]"]), kind, name)

    def _crash(self, rule: rules.Rule, category: str, stage: Stage, excerpt: str, kind: str, message: str,
               frames: Sequence[tuple[str, str]] = (), matched: str = "", assumed: bool = False) -> Crash:
        amd = "amd " if AMD.search(message.lower()) else ""
        message = self.table.without_advice(folded(message)).replace("\0", "")
        blame = rule.blame_by_stage.get(stage, rule.blame)
        elsewhere = (rule.blame, *rule.blame_by_stage.values()) if assumed else ()
        why = rule.blame_why or self.table.grounds.get(blame, "")
        if rule.blame_by_stage:
            why += f" At stage {stage}{', which is assumed' if assumed else ''}."
        return Crash(category=category, stage=stage, blame=blame, blame_why=why,
                     blame_also=tuple(dict.fromkeys(b for b in (*rule.blame_also, *elsewhere) if b is not blame)),
                     signature=signature(stage, kind, amd + around(message, matched), frames),
                     excerpt=Redactor.from_command((), os.environ).text(excerpt), explanation=rule.explanation,
                     next_step=self.table.advice_for(rule.next_step, self.log.engine, self.log.lower),
                     engine=self.log.engine, exit_status=self.exit_status, after_s=self.after_s)

    def _exception(self, since: int) -> Block | None:
        """The first exception, with frames if possible, that is no warning and not about another process."""
        own = [b for b in self.blocks if b.at is not None and b.at >= since
               and self.log.lines[b.at].level not in ("info", "warning")
               and not self.table.only_echoes(self.log.part(self.text, b.at, b.last + 1))]
        return next((b for b in own if b.frames), own[0] if own else None)

    def _error_line(self) -> int | None:
        """The first line in which the engine itself states an error, after its last ready line."""
        return next((i for i, line in enumerate(self.log.lines) if i >= self.ready and line.text and (
            line.level == "error" or ERROR_LINE.match(line.text)) and not self.table.aside.search(line.text)
            and self.log.part(self.text, i, i + 1).strip("\0\n ")), None)

    def _line(self, block: Block) -> int:
        return block.last if block.at is None else block.at

    def _stage_at(self, line: int) -> Stage | None:
        """Stage of a failure: that of its traceback's code, else the progress of the start."""
        if self.given is not None:
            return self.given
        near = [*self._inside(line), *(b for b in self.blocks if line < b.first <= line + AFTER),  # also chained ones
                *(b for b in reversed(self.blocks) if line - BEFORE <= b.last < line)]
        doing = next((stage for block in near if (stage := self._doing(block)) is not None), None)
        if doing is Stage.SERVING and self.reached is Stage.WARMUP:
            return Stage.WARMUP  # the first request, by the server itself
        if doing is None:
            known = filter(None, (self._said(self.log.lines[line].text), self.reached))
            return max(known, key=STAGES.index, default=None)
        return doing

    def _doing(self, block: Block) -> Stage | None:
        return self._said("\n".join(block.said))

    def _said(self, text: str) -> Stage | None:
        return next((stage for stage, pattern in self.table.frames if pattern.search(text.lower())), None)

    def _inside(self, line: int) -> list[Block]:
        """Tracebacks around a line, the smallest first."""
        return sorted((b for b in self.blocks if b.first <= line <= b.last), key=lambda b: b.last - b.first)

    def _excerpt(self, line: int, block: Block | None) -> str:
        """Lines that show the cause: the end of its traceback, or the lines around it."""
        lines = self.log.lines
        if block is not None and block.frames:
            frames = [i for i in range(block.first, (block.at or block.last) + 1) if FRAME.match(lines[i].text)]
            first = frames[-EXCERPT_FRAMES] if len(frames) > EXCERPT_FRAMES else block.first
            chosen = sorted({block.first, *range(first, block.last + 1), line})
        else:
            chosen = list(range(max(0, line - CONTEXT_LINES), min(len(lines), line + CONTEXT_LINES + 1)))
        if len(chosen) > EXCERPT_LINES:
            keep = EXCERPT_LINES // 2
            chosen = sorted({*chosen[:1], *(i for i in chosen if abs(i - line) <= keep)})
        return "\n".join(_shown(lines[i]) for i in chosen if not MARKS.match(lines[i].text))


def _shown(line: Line) -> str:
    text = line.text if len(line.text) <= EXCERPT_WIDTH else line.text[:EXCERPT_WIDTH] + " ..."
    writer = f"[{line.writer}] " if line.writer else ""
    return f"{writer}{text}" + (f"   [{line.repeats} such lines]" if line.repeats > 1 else "")

