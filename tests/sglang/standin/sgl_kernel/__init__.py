"""Stand-in for SGLang's compiled kernels, for the tests that run SGLang on a plain CPU.

SGLang imports names from here on every device, yet serving on a CPU without AMX calls none of them: its math is torch.
So every name exists, and calling one says that it is not there.
"""

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **keywords: object) -> Any:
        raise NotImplementedError(f"the stand-in for sgl_kernel has no {name}")

    return missing
