"""The verb dashboard: optuna-dashboard on the study, on loopback only, with feasibility put right.

The dashboard (0.21) reads constraints in the form of Optuna 4 and picks the best trial without them. The storage
that it gets here gives it both as it expects them; plots and the study's note are kept in the study itself.
"""

from __future__ import annotations

import copy
import socketserver
import sys
import threading
import warnings
from collections.abc import Callable, Container, Iterable
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import optuna
from optuna.storages import _CachedStorage
from optuna.trial import FrozenTrial, TrialState

from autotune.records import AutotuneError
from autotune.report.load import read
from autotune.report.plots import figures
from autotune.report.story import Story
from autotune.report.studynote import study_note
from autotune.report.wording import one_line

if TYPE_CHECKING:
    from autotune.config.settings import Settings
    from autotune.storage.study import Study

PORT = 8080
REFRESH_S = 15.0
HOST = "127.0.0.1"


def dashboard(settings: Settings, study: Study) -> int:
    """Serve until interrupted. New trials of a running tuner appear by themselves, also in the plots."""
    with open_server(settings, study) as server:
        ended = threading.Event()
        follower = threading.Thread(target=_follow, args=(settings, study, ended), daemon=True)
        follower.start()
        print(f"dashboard: http://{HOST}:{server.server_port}/dashboard/studies/{study.inner._study_id} "
              "(Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
        finally:
            ended.set()
    return 0


def open_server(settings: Settings, study: Study, port: int = PORT) -> WSGIServer:
    """The server, bound to loopback and ready to serve; another port is taken when `port` is in use."""
    from optuna.artifacts import FileSystemArtifactStore
    from optuna_dashboard import wsgi  # type: ignore[import-untyped]

    publish(study, read(settings, study))
    artifacts = settings.folder / "artifacts"
    artifacts.mkdir(parents=True, exist_ok=True)
    storage: Any = study.inner._storage
    app = wsgi(storage=FeasibleFirst(getattr(storage, "_backend", storage)),
               artifact_store=FileSystemArtifactStore(str(artifacts)))
    try:
        server = make_server(HOST, port, app, _Server, _Quiet)
    except OSError:
        server = make_server(HOST, 0, app, _Server, _Quiet)
    server.set_app(guarded(app, server.server_port))
    return server


class FeasibleFirst(_CachedStorage):
    """A study's storage as the dashboard expects it: constraints as a list, and a best trial that keeps them."""

    def get_all_trials(self, study_id: int, deepcopy: bool = True,
                       states: Container[TrialState] | None = None) -> list[FrozenTrial]:
        return [_with_list(trial) for trial in super().get_all_trials(study_id, deepcopy=deepcopy, states=states)]

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        complete = super().get_all_trials(study_id, deepcopy=False, states=(TrialState.COMPLETE,))
        feasible = [t for t in complete if t.user_attrs.get("feasible") and t.value is not None]
        best = max(feasible, key=lambda t: t.value or 0.0) if feasible else super().get_best_trial(study_id)
        return _with_list(best)


def _with_list(trial: FrozenTrial) -> FrozenTrial:
    """The trial with its constraints in the place where Optuna 4 kept them."""
    changed = copy.copy(trial)
    changed._system_attrs = {**trial._system_attrs, "constraints": list(trial.constraints.values())}
    return changed


def publish(study: Study, story: Story) -> None:
    """Keep the plots, the study's note and the objective's name in the study, for any dashboard on it."""
    from optuna_dashboard import save_note, save_plotly_graph_object

    for figure in figures(story):
        save_plotly_graph_object(study.inner, figure, graph_object_id=figure.name)
    save_note(study.inner, study_note(story))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.inner.set_metric_names([story.unit])


def _follow(settings: Settings, study: Study, ended: threading.Event) -> None:
    """Publish again whenever trials were added. What cannot be read now is tried again, and said once."""
    seen: int | None = None
    said = ""
    while not ended.wait(REFRESH_S):
        try:
            now = _finished(study)
            if seen is not None and now != seen:
                publish(study, read(settings, study))
            seen, said = now, ""
        except AutotuneError as error:
            if str(error) != said:
                print(f"autotune: the plots are as they were: {one_line(error)}", file=sys.stderr, flush=True)
            said = str(error)


def _finished(study: Study) -> int:
    return sum(r.state in ("COMPLETE", "PRUNED", "FAIL") for r in study.records())


App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def guarded(app: App, port: int) -> App:
    """Refuse what other pages in the user's browser could send: foreign host names and foreign origins."""
    names = {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")}
    origins = {f"http://{name}" for name in names}

    def guard(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        origin = environ.get("HTTP_ORIGIN")
        if environ.get("HTTP_HOST") not in names or (origin is not None and origin not in origins):
            start_response("403 Forbidden", [("Content-Type", "text/plain")])
            return [b"this dashboard answers on loopback only\n"]
        return app(environ, start_response)

    return guard


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    allow_reuse_address = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not worth a line each."""
