"""Puts a fault into a module's code for as long as a test wants to see it noticed."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any


@contextmanager
def fault(module_name: str, right: str, wrong: str) -> Iterator[None]:
    """Inside, every function of the module behaves as if its source had `wrong` where it has `right`, once.

    Functions stay the same objects, so whoever has imported one by name gets the fault too.
    """
    module = import_module(module_name)
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert source.count(right) == 1, f"{module_name} has {right!r} {source.count(right)} times"
    changed = ModuleType(module_name)
    exec(compile(source.replace(right, wrong), module.__file__, "exec"), vars(changed))
    originals, replacements = functions_of(module), functions_of(changed)
    codes = {name: function.__code__ for name, function in originals.items()}
    for name, function in originals.items():
        function.__code__ = replacements[name].__code__
    try:
        yield
    finally:
        for name, function in originals.items():
            function.__code__ = codes[name]


def functions_of(module: ModuleType) -> dict[str, FunctionType]:
    """The module's own functions and methods, by qualified name."""
    found: dict[str, FunctionType] = {}

    def collect(holder: Any) -> None:
        for value in list(vars(holder).values()):
            plain = value.__func__ if isinstance(value, staticmethod) else value
            plain = plain.fget if isinstance(plain, property) else plain
            if isinstance(plain, FunctionType) and plain.__module__ == module.__name__:
                found[plain.__qualname__] = plain
            elif isinstance(plain, type) and plain.__module__ == module.__name__ and plain is not holder:
                collect(plain)

    collect(module)
    return found
