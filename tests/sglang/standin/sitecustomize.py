"""Lets torchvision's wheel be imported beside a CPU build of torch, which lacks the operators that it refers to.

Python imports this module at its start when the folder is on PYTHONPATH. torch itself is only touched when
torchvision is about to be imported.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            make: Any = torch.library.Library
            library = make("torchvision", "DEF")
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            self.library = library  # dropping it would undo the definitions
            _kept.append(self)
        return None


_kept: list[_BeforeTorchvision] = []
sys.meta_path.insert(0, _BeforeTorchvision())
