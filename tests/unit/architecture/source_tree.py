"""The repository's own source, as data for the architecture tests."""

import ast
import functools
import subprocess
from collections.abc import Iterator
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


@functools.cache
def imported_modules(file: Path) -> frozenset[str]:
    """Every module that a file names in an import, wherever in the file. `from a import b` gives `a` and `a.b`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} imports relatively"
            module = node.module or ""
            found.add(module)
            found.update(f"{module}.{alias.name}" for alias in node.names)
    return frozenset(found)


def committed_files() -> list[Path]:
    """What git knows, plus what it would take next."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / line for line in listing.splitlines() if (ROOT / line).is_file()]
