"""SGLang's Python on a machine without a GPU: what it imports at its start and no test calls.

PyPI's torchvision is a CUDA build, which does not load beside a torch without CUDA. SGLang imports it for its
processors of images. Python imports this module at its start when its folder is on PYTHONPATH: empty modules take
torchvision's place, whose names may be imported and fail when they are called. Nothing of SGLang, and no kernel, is
replaced.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

MODULES = (
    "torchvision", "torchvision.io", "torchvision.ops", "torchvision.transforms", "torchvision.transforms.functional",
    "torchvision.transforms.v2", "torchvision.transforms.v2.functional",
)  # fmt: skip


class _Named(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"torchvision is not there, and {cls.__name__} was called")


def _stand_in(name: str) -> type:
    return _Named(name, (), {})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)


def _install() -> None:
    for name in MODULES:
        module = _Module(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        module.__version__ = "0.0"  # transformers asks for it
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)


_install()
