"""The repository's own source, as data for the architecture tests."""

import ast
import functools
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = ("clawstream", "schemas", "services")
TORCH_SERVICES = ("services.trainer", "services.engine")


def source_files(*packages: str) -> Iterator[Path]:
    """Every Python file of these top-level packages."""
    for package in packages:
        yield from sorted((ROOT / package).rglob("*.py"))


def module_name(file: Path) -> str:
    """The import name of a file: `a/b/__init__.py` is `a.b`."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def file_of(module: str) -> Path | None:
    """The file of a module of this repository; None for anything else."""
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


@dataclass(frozen=True, slots=True)
class Imports:
    """Modules that a file names in imports. `from a import b` gives `a` and `a.b`."""

    anywhere: frozenset[str]
    at_start: frozenset[str]
    """What importing the file imports: not what stands in functions, nor under `if TYPE_CHECKING`."""


def imported_modules(file: Path) -> frozenset[str]:
    """Every module that a file names in an import, wherever in the file."""
    return imports_of(file).anywhere


@functools.cache
def imports_of(file: Path) -> Imports:
    """One pass for both: parsing all of the source takes seconds."""
    anywhere: set[str] = set()
    at_start: set[str] = set()

    def visit(node: ast.AST, *, deferred: bool) -> None:
        found: set[str] = set()
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} imports relatively"
            module = node.module or ""
            found.add(module)
            found.update(f"{module}.{alias.name}" for alias in node.names)
        anywhere.update(found)
        if not deferred:
            at_start.update(found)
        deferred = deferred or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        deferred = deferred or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                visit(child, deferred=deferred)

    visit(ast.parse(file.read_text(encoding="utf-8"), str(file)), deferred=False)
    return Imports(frozenset(anywhere), frozenset(at_start))


def committed_files() -> list[Path]:
    """What git knows, plus what it would take next."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / line for line in listing.splitlines() if (ROOT / line).is_file()]
