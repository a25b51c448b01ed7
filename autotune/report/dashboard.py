"""optuna-dashboard on a study: the verb dashboard, plots, notes in Markdown, files of trials as artifacts.

    attach(trial, launch folder)    # before the trial is finished: a finished trial takes no artifacts
    annotate(study, record)            # after it is finished
    dashboard(settings, study)         # serve, on loopback only
"""

from __future__ import annotations

import contextlib
import copy
import json
import pathlib
import shlex
import socketserver
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import optuna
from optuna.storages import _CachedStorage
from optuna.trial import FrozenTrial, TrialState

from autotune.measure.objective import UNITS
from autotune.records import AutotuneError, Measurement
from autotune.report import tables, verdict
from autotune.report.charts import GREEN, GREY, RED, layout, load_curves, plain, progress, tradeoff
from autotune.report.crashes import fates
from autotune.report.measured import FIGURES, choice_text, config_text, limited, standing
from autotune.report.render import markdown
from autotune.report.story import Story, read
from autotune.report.tables import Cell, Table, table
from autotune.storage.trial import LaunchFacts, TrialRecord
from autotune.utils.files import last_bytes
from autotune.utils.text import duration, one_line, percent, with_unit

if TYPE_CHECKING:
    from autotune.config.settings import Settings
    from autotune.storage.study import Study

PORT = 8080
REFRESH_S = 15.0
HOST = "127.0.0.1"
LARGEST = 4 * 2**20  # bytes of an artifact: of a larger file only the end is copied; all of it stays in launches/
EXCERPT = 6000  # characters of a log in a note
WIDEST = 120  # characters of a line of a log


def dashboard(settings: Settings, study: Study) -> int:
    """Serve until interrupted. New trials of a running tuner appear by themselves, also in the plots."""
    with open_server(settings, study) as server:
        ended = threading.Event()
        threading.Thread(target=_follow, args=(settings, study, ended), daemon=True).start()
        print(f"dashboard: http://{HOST}:{server.server_port}/dashboard/studies/{study.inner._study_id} "
              "(Ctrl-C ends it)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
        ended.set()
    return 0


def open_server(settings: Settings, study: Study, port: int = PORT) -> WSGIServer:
    """The server, bound to loopback and ready to serve; another port is taken when `port` is in use."""
    from optuna.artifacts import FileSystemArtifactStore
    from optuna_dashboard import wsgi  # type: ignore[import-untyped]

    publish(study, read(settings, study))
    artifacts = settings.folder / "artifacts"
    artifacts.mkdir(parents=True, exist_ok=True)
    app = wsgi(storage=FeasibleFirst(study.storage), artifact_store=FileSystemArtifactStore(str(artifacts)))
    try:
        server = make_server(HOST, port, app, _Server, _Quiet)
    except OSError:
        server = make_server(HOST, 0, app, _Server, _Quiet)
    server.set_app(guarded(app, server.server_port))
    return server


class FeasibleFirst(_CachedStorage):
    """A study's storage as the dashboard (0.21) expects it: constraints as Optuna 4 had them, a feasible best trial."""

    def get_all_trials(self, study_id: int, deepcopy: bool = True,
                       states: Container[TrialState] | None = None) -> list[FrozenTrial]:
        return [_with_list(trial) for trial in super().get_all_trials(study_id, deepcopy=deepcopy, states=states)]

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        complete = super().get_all_trials(study_id, deepcopy=False, states=(TrialState.COMPLETE,))
        feasible = [t for t in complete if t.user_attrs.get("feasible") and t.value is not None]
        best = max(feasible, key=lambda t: t.value or 0.0) if feasible else super().get_best_trial(study_id)
        return _with_list(best)


def _with_list(trial: FrozenTrial) -> FrozenTrial:
    changed = copy.copy(trial)
    changed._system_attrs = {**trial._system_attrs, "constraints": list(trial.constraints.values())}
    return changed


def publish(study: Study, story: Story) -> None:
    """Store the plots, the study's note and the objective's name in the study, for any dashboard on it."""
    from optuna_dashboard import save_note, save_plotly_graph_object

    for plot in plots(story):
        save_plotly_graph_object(study.inner, plot, graph_object_id=plot.name)
    save_note(study.inner, study_note(story))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.inner.set_metric_names([story.unit])


class Plot(NamedTuple):
    """A plotly figure with the method that optuna_dashboard.save_plotly_graph_object needs; plotly is not imported."""

    name: str
    figure: Mapping[str, Any]

    def to_json(self) -> str:
        return json.dumps(self.figure)


def plots(story: Story) -> list[Plot]:
    """Every plot that the study has data for: the page's figures, the crash map and the levers."""
    pictures = [figure and figure.plotly() for figure in (tradeoff(story), load_curves(story), progress(story))]
    found = {"1-tradeoff": pictures[0], "2-load": pictures[1], "3-crash-map": _crash_map(story),
             "4-levers": _levers(story), "5-progress": pictures[2]}
    return [Plot(f"autotune-{name}", figure) for name, figure in found.items() if figure]


def _crash_map(story: Story) -> dict[str, Any] | None:
    names, rows = fates(story.space, story.records, story.crashes)
    if not names or not rows:
        return None
    about = {g.signature: f"<br>{plain(g.crash.category)}" for g in story.crashes}
    columns = ["served", *names]
    counts = [[row.outcomes.get(c, 0) for c in columns] for row in rows]
    trace = {"type": "heatmap", "colorscale": "Cividis", "xgap": 2, "ygap": 2,
             "x": [plain(c) + about.get(c, "") for c in columns],
             "y": [plain(choice_text(r.param, r.value)) for r in rows],
             "z": [[n / sum(line) for n in line] for line in counts],
             "text": [[f"{n}/{sum(line)}" if n else "" for n in line] for line in counts],
             "texttemplate": "%{text}", "textfont": {"size": 12}, "hoverinfo": "x+y+text", "zmin": 0, "zmax": 1,
             "colorbar": {"title": {"text": "share"}, "tickformat": ".0%"}}
    return {"data": [trace], "layout": layout(
        "Crash map: how launches with each choice ended", "", "", height=120 + 26 * len(rows),
        yaxis={"autorange": "reversed", "automargin": True}, xaxis={"automargin": True})}


def _levers(story: Story) -> dict[str, Any] | None:
    found = sorted([x for x in story.levers if not x.load] or story.levers, key=lambda x: x.factor)
    if not found:
        return None
    trace = {"type": "bar", "orientation": "h", "x": [100 * (x.factor - 1) for x in found],
             "y": [plain(f"{x.name} instead of {x.instead}") for x in found],
             "marker": {"color": [{1: GREEN, -1: RED, 0: GREY}[x.sign] for x in found]},
             "error_x": {"type": "data", "symmetric": False,
                         "array": [0 if x.high is None else 100 * (x.high - x.factor) for x in found],
                         "arrayminus": [0 if x.low is None else 100 * (x.factor - x.low) for x in found]},
             "text": [f"{x.pairs} pairs" for x in found], "textposition": "none", "hoverinfo": "x+y+text"}
    return {"data": [trace], "layout": layout(
        "What each choice is worth (95 % intervals; grey: not distinguishable from no effect)",
        "Change of the objective in %", "", height=160 + 26 * len(found), yaxis={"automargin": True})}


def study_note(story: Story) -> str:
    return markdown("study_note.jinja", story=story, figures=tables.figures(story)._replace(caption=""),
                    shares=tables.shares(story),
                    command=f"python -m autotune report +space={shlex.quote(story.space.name)}")


def annotate(study: Study, record: TrialRecord) -> None:
    """Store the note of a finished trial. Unit and limits come from the study's identity."""
    from optuna_dashboard import save_note

    identity = study.attrs().get("identity") or {}
    unit = UNITS.get(str(identity.get("objective")), "")
    save_note(study.trial(record.number), note(record, unit, identity.get("limits") or {}))


def attach(trial: optuna.Trial, launch: pathlib.Path) -> list[str]:
    """Copy the files of a running trial into the study's artifact store; returns their ids.

    `launch`: the folder of its launch. Absent and empty files are left out.
    """
    from optuna.artifacts import FileSystemArtifactStore, upload_artifact

    artifacts = launch.parents[1] / "artifacts"
    files = [launch / name for name in ("server.log", f"power-{trial.number}.csv", f"requests-{trial.number}.jsonl")]
    artifacts.mkdir(parents=True, exist_ok=True)
    store, ids = FileSystemArtifactStore(str(artifacts)), []
    with tempfile.TemporaryDirectory() as scratch:
        for file in (file for file in files if file.is_file() and file.stat().st_size > 0):
            if file.stat().st_size > LARGEST:
                end, file = last_bytes(file, LARGEST), pathlib.Path(scratch) / file.name
                file.write_bytes(end)
            ids.append(upload_artifact(artifact_store=store, file_path=str(file), study_or_trial=trial))
    return ids


def note(record: TrialRecord, unit: str, limits: Mapping[str, float]) -> str:
    crash, m, launch = record.crash, record.measurement, record.launch
    window = [f"Window {duration(m.window_s)}", f"{m.requests:,} requests",
              f"not comparable: {', '.join(m.reasons)}" if m.reasons else ""] if m is not None else []
    spent = [f"launch {record.launch_id}" if record.launch_id is not None else "",
             f"{duration(record.launch_s)} to start" if record.launch_s else "",
             f"{duration(record.cost_s)} in all" if record.cost_s is not None else ""]
    return markdown(
        "note.jinja", standing=standing(record), config=config_text(record.config), crash=crash,
        excerpt=wrapped(crash.excerpt[-EXCERPT:]) if crash is not None and crash.excerpt.strip() else "",
        figures=_figures(record, m, unit, limits) if m is not None else None, energy=m and m.energy,
        window="; ".join(w for w in window if w), fail_reason=record.start.fail_reason, same_as=record.same_as,
        command=_command(launch) if launch.argv else "", spent=", ".join(s for s in spent if s))


def _figures(record: TrialRecord, m: Measurement, unit: str, limits: Mapping[str, float]) -> Table:
    rows: list[tuple[str | Cell, ...]] = []
    if record.value is not None:
        error = "" if m.relative_error is None else f" ± {percent(m.relative_error)}"
        rows.append((Cell("Objective", "strong"), Cell(with_unit(record.value, unit) + error, "strong"), ""))
    figures = record.figures
    for name, (title, of) in FIGURES.items():
        if name in figures:
            limit = next((x for x in limits if limited(x) == name), name)
            ratio = record.ratios.get(limit)
            shown = (with_unit(limits[limit], of) if limit in limits else "") + verdict.headroom(ratio)
            tone = "strong" if (ratio or 0) > 1 else ""
            rows.append((title, with_unit(figures[name], of), Cell(shown.strip(), tone)))
    return table(("Figure", ">Measured", "Limit"), rows)


def _command(launch: LaunchFacts) -> str:
    """The server's environment and command, a flag with its values on each line."""
    env = " ".join(f"{k}={shlex.quote(v)}" for k, v in (launch.env or {}).items())
    words = "".join((" \\\n  " if arg.startswith("--") else " ") + shlex.quote(arg) for arg in launch.argv)
    return f"{env} \\\n {words}" if env else words[1:]


def wrapped(text: str) -> str:
    """Long lines broken: the dashboard lets a code block widen the whole page."""
    return "\n".join(line[i:i + WIDEST] for line in text.splitlines() for i in range(0, max(len(line), 1), WIDEST))


def _follow(settings: Settings, study: Study, ended: threading.Event) -> None:
    """Publish again whenever trials were added. What cannot be read now is tried again, and said once."""
    seen: int | None = None
    said = ""
    while not ended.wait(REFRESH_S):
        try:
            now = sum(r.state in ("COMPLETE", "PRUNED", "FAIL") for r in study.records())
            if seen is not None and now != seen:
                publish(study, read(settings, study))
            seen, said = now, ""
        except AutotuneError as error:
            if str(error) != said:
                print(f"autotune: the plots are as they were: {one_line(error)}", file=sys.stderr, flush=True)
            said = str(error)


App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def guarded(app: App, port: int) -> App:
    """Refuse what other pages in the user's browser could send: foreign host names and foreign origins."""
    names = {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")}
    origins = {None, *(f"http://{name}" for name in names)}

    def guard(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ.get("HTTP_HOST") not in names or environ.get("HTTP_ORIGIN") not in origins:
            start_response("403 Forbidden", [("Content-Type", "text/plain")])
            return [b"this dashboard answers on loopback only\n"]
        return app(environ, start_response)

    return guard


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    allow_reuse_address = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None: ...
