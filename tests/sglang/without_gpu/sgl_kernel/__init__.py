"""What SGLang imports as `sgl_kernel` on a machine without a GPU.

SGLang 0.5.23 imports its CUDA kernels at start-up whatever device it is told to use, and the real package loads the
CUDA driver when it is imported. With this folder first on PYTHONPATH the imports succeed: every name, in this module
and in any module below it, is a kernel that says which one it is when something calls it. The PyTorch code paths that
`--device cpu --attention-backend torch_native` selects call none.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

_PACKAGE = __name__
__path__: list[str] = []
"""No files: `_EveryModuleBelow` makes the modules."""


class AbsentKernel:
    """A kernel of the real package. Naming it is harmless; calling it is a defect of the setup."""

    def __init__(self, qualified_name: str) -> None:
        self._qualified_name = qualified_name

    def __call__(self, *_arguments: object, **_options: object) -> NoReturn:
        raise NotImplementedError(f"{self._qualified_name} runs on a GPU only; SGLang should not need it on a CPU")

    def __getattr__(self, name: str) -> "AbsentKernel":
        _refuse_special(self._qualified_name, name)
        return AbsentKernel(f"{self._qualified_name}.{name}")


class _ModuleOfKernels(ModuleType):
    """A module in which every name is a kernel."""

    def __getattr__(self, name: str) -> AbsentKernel:
        _refuse_special(self.__name__, name)
        return AbsentKernel(f"{self.__name__}.{name}")


class _EveryModuleBelow(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `sgl_kernel.x.y` for every x and y."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{_PACKAGE}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _ModuleOfKernels(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def _refuse_special(owner: str, name: str) -> None:
    """`__file__`, `__all__` and their like must be absent, or the import system takes them for what they are not."""
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(f"{owner} has no attribute {name}")


def __getattr__(name: str) -> AbsentKernel:
    _refuse_special(_PACKAGE, name)
    return AbsentKernel(f"{_PACKAGE}.{name}")


sys.meta_path.append(_EveryModuleBelow())
