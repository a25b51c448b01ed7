"""The import order goes one way, nothing heavy is imported early, and third-party libraries stay in their rooms."""

from __future__ import annotations

import ast
import graphlib
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1] / "autotune"
# Rooms from the bottom up: a module imports only from its own room and from rooms before it.
ORDER = ("records", "utils", "space", "loadgen", "engine", "crash", "power", "storage", "measure", "search", "config",
         "executors", "tuning", "report", "export", "cli", "__main__")
# The embedded engine is a program of its own: it imports nothing of ours and nothing of ours imports it.
BESIDE = {"ddtree"}


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def imports(file: pathlib.Path) -> set[str]:
    """Rooms of ours that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("autotune"):
            names = [f"autotune.{a.name}" for a in node.names] if node.module == "autotune" else [node.module]
            found |= {room(n) for n in names}
        elif isinstance(node, ast.Import):
            found |= {room(a.name) for a in node.names if a.name.startswith("autotune.")}
    return {name for name in found if not name.startswith("__version")}


def files() -> list[tuple[str, pathlib.Path]]:
    pairs = [(p.relative_to(ROOT).parts[0].removesuffix(".py"), p) for p in sorted(ROOT.rglob("*.py"))]
    return [(name, path) for name, path in pairs if name != "__init__"]


def test_every_room_has_a_place_in_the_order() -> None:
    assert {name for name, _ in files()} == set(ORDER) | BESIDE


def test_imports_never_go_up() -> None:
    wrong = [f"{path.relative_to(ROOT)} imports {other}" for name, path in files() if name not in BESIDE
             for other in imports(path)
             if other != name and (other in BESIDE or ORDER.index(other) > ORDER.index(name))]
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {".".join(p.relative_to(ROOT.parent).with_suffix("").parts): p for p in ROOT.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {t if (t := f"{node.module}.{a.name}") in modules else node.module for a in node.names}
        graph[name] = found & set(modules)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_the_embedded_engine_stands_alone() -> None:
    wrong = [str(path) for name, path in files() if name in BESIDE for other in imports(path) if other not in BESIDE]
    assert wrong == []


def test_the_command_line_imports_nothing_heavy_before_it_needs_it() -> None:
    program = ("import sys, autotune.__main__, autotune.config.compose, autotune.executors.preflight;"
               "import autotune.cli.verbs;"
               "print([m for m in ('torch','optuna','hydra','httpx','numpy','rich','pynvml') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT.parent, check=True)
    assert done.stdout.strip() == "[]"


def test_optuna_hydra_and_nvml_stay_in_their_rooms() -> None:
    homes = {"optuna": {"storage", "search", "report", "cli"}, "hydra": {"config"}, "omegaconf": {"config", "__main__"},
             "pynvml": {"engine"}, "torch": BESIDE, "sqlalchemy": {"storage"}}
    wrong = []
    for name, path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            modules = ([a.name for a in node.names] if isinstance(node, ast.Import) else
                       [node.module or ""] if isinstance(node, ast.ImportFrom) else [])
            wrong += [f"{path.relative_to(ROOT)}: {m}" for m in modules
                      if m.split(".")[0] in homes and name not in homes[m.split(".")[0]]]
    assert wrong == []


def test_every_test_that_ci_names_exists() -> None:
    named = set(re.findall(r"tests/[\w/.-]*\w", (ROOT.parent / ".ci" / "run").read_text()))
    assert named and not [name for name in named if not (ROOT.parent / name).exists()]
