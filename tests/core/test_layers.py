"""The import order goes one way, nothing heavy is imported early, and third-party libraries stay in their rooms."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2] / "autotune"
LAYERS: list[set[str]] = [
    {"secretnames", "printable", "framing"},
    {"records", "redact", "files", "awake", "answers"},
    {"rules"},
    {"space"},
    {"engine", "crash", "measure"},
    {"workload", "storage", "yamlfile"},
    {"settings", "history", "turns", "heartbeat"},
    {"config"},
    {"patience"},
    {"stored"},
    {"study", "preflight", "journal", "gate", "judge"},
    {"fleet", "origin", "checklist"},
    {"trial"},
    {"remote"},
    {"search", "rayhosts", "slots"},
    {"tune", "watch", "matrix"},
    {"confirm", "bugs", "neighbours"},
    {"review"},
    {"verbs"},
    {"__main__"},
]
"""Rooms from the bottom up: a module imports only from its own layer's room or from layers below it."""
BESIDE = {"engines"}
"""The embedded engine is a program of its own: it imports nothing of ours and nothing of ours imports it."""


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def level(name: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if name in layer)


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


def test_every_room_has_a_layer() -> None:
    assert {name for name, _ in files()} == set().union(*LAYERS) | BESIDE


def test_imports_never_go_up() -> None:
    wrong = [f"{path.relative_to(ROOT)} imports {other}" for name, path in files() if name not in BESIDE
             for other in imports(path) if other != name and (other in BESIDE or level(other) >= level(name))]
    assert wrong == []


def test_the_embedded_engine_stands_alone() -> None:
    wrong = [str(path) for name, path in files() if name in BESIDE for other in imports(path) if other not in BESIDE]
    assert wrong == []


def test_the_command_line_imports_nothing_heavy_before_it_needs_it() -> None:
    program = ("import sys, autotune.__main__, autotune.config, autotune.preflight, autotune.verbs;"
               "print([m for m in ('torch','optuna','hydra','httpx','numpy','rich','pynvml') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT.parent, check=True)
    assert done.stdout.strip() == "[]"


def test_optuna_hydra_and_nvml_stay_in_their_rooms() -> None:
    homes = {"optuna": {"study", "storage", "patience", "heartbeat", "search", "review", "verbs"}, "hydra": {"config"},
             "omegaconf": {"config", "__main__"}, "pynvml": {"engine", "measure"}, "torch": BESIDE,
             "sqlalchemy": {"storage", "patience", "turns"}}
    wrong = []
    for name, path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            modules = ([a.name for a in node.names] if isinstance(node, ast.Import) else
                       [node.module or ""] if isinstance(node, ast.ImportFrom) else [])
            wrong += [f"{path.relative_to(ROOT)}: {m}" for m in modules
                      if m.split(".")[0] in homes and name not in homes[m.split(".")[0]]]
    assert wrong == []


CALLS = {"eval", "exec", "compile", "os.system", "os.popen", "pickle.load", "pickle.loads", "marshal.loads",
         "yaml.load", "yaml.unsafe_load", "yaml.full_load", "instantiate", "__import__"}
"""Calls that run what a file or a stranger says."""
LOADERS = {"SafeLoader", "CSafeLoader"}


def doors(source: str) -> list[str]:
    """What in a source runs a shell, unpickles, or runs text as code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] + ([node.module or ""] if isinstance(node, ast.ImportFrom) else [])
            found += [name for name in names if name.split(".")[0] in ("pickle", "marshal", "shelve", "dill")]
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            safe = any(k.arg == "Loader" and LOADERS & set(ast.unparse(k.value).replace('"', ".").replace("'", ".")
                       .split(".")) for k in node.keywords)
            shell = any(k.arg == "shell" and not (isinstance(k.value, ast.Constant) and k.value.value is False)
                        for k in node.keywords)
            if shell or (name in CALLS and not (safe and name == "yaml.load")):
                found.append(name)
    return found


def test_no_module_runs_a_shell_unpickles_or_runs_text_as_code() -> None:
    wrong = {str(path.relative_to(ROOT)): found for _, path in files() if (found := doors(path.read_text()))}
    assert wrong == {}


def test_the_search_for_such_doors_finds_them() -> None:
    assert doors("import pickle") and doors("from pickle import loads") and doors("subprocess.run(c, shell=True)")
    assert doors("yaml.load(text)") and doors("yaml.load(t, Loader=yaml.Loader)") and doors("eval(text)")
    assert not doors("yaml.load(t, Loader=yaml.SafeLoader)") and not doors("re.compile(x)")
