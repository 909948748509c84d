"""What may not be in committed text and code."""

import ast
import re
from pathlib import Path

import pytest

from tests.unit.architecture.source_tree import PACKAGES, ROOT, committed_files, source_files

# Written apart, so that this file does not offend itself.
MACHINE_PATHS = re.compile(r"(?<![\w.:/])/(?:" + "|".join(("work", "root", "tmp", "home/[a-z]")) + r")/")
REGISTRY_HOSTS = re.compile(
    "|".join(
        ("py" + r"pi\.org", "python" + r"hosted\.org", r"repo1?\.maven\.", "registry" + r"\.npm", "artifact" + "ory")
    )
)
BINARY_SUFFIXES = {".png", ".jpg", ".gz", ".zst", ".safetensors", ".gguf", ".parquet", ".bin", ".npz"}


def texts() -> list[tuple[Path, str]]:
    return [
        (file.relative_to(ROOT), file.read_text(encoding="utf-8"))
        for file in committed_files()
        if file.suffix not in BINARY_SUFFIXES
    ]


@pytest.mark.parametrize("pattern", [MACHINE_PATHS, REGISTRY_HOSTS], ids=["machine path", "registry host"])
def test_no_text_depends_on_this_machine(pattern: re.Pattern[str]) -> None:
    found = [
        f"{file}:{number}: {line.strip()[:100]}"
        for file, text in texts()
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]
    assert found == []


def test_the_patterns_find_what_they_should() -> None:
    assert MACHINE_PATHS.search('open("' + "/work" + '/x")')
    assert not MACHINE_PATHS.search("https://example.org/work/x")
    assert REGISTRY_HOSTS.search("https://" + "pypi" + ".org/simple")


def test_no_print_and_no_pickle() -> None:
    found: list[str] = []
    words = re.compile(r"\b(print|pickle|dill|joblib)\b")
    for file in source_files(*PACKAGES):
        text = file.read_text(encoding="utf-8")
        if not words.search(text):  # parsing all of the source takes seconds
            continue
        for node in ast.walk(ast.parse(text)):
            where = f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                found.append(f"{where} prints")
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [
                f"{where} imports {name}" for name in names if name.partition(".")[0] in ("pickle", "dill", "joblib")
            ]
    assert found == []


def test_no_module_is_called_utils() -> None:
    vague = {"util", "utils", "helper", "helpers", "misc", "common"}
    assert [str(file) for file in source_files(*PACKAGES) if {file.stem, file.parent.name} & vague] == []


def test_every_setting_of_the_core_has_a_docstring() -> None:
    found: list[str] = []
    for file in source_files(*PACKAGES):
        if file.name != "settings.py":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef):
                continue
            for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
                is_field = isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
                has_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                if is_field and not has_text:
                    found.append(f"{file.relative_to(ROOT)}:{statement.lineno} {node.name}")
    assert found == []


def test_help_is_shown_as_it_stands() -> None:
    """Typer's help reads `[word ...]` as markup and shows nothing of it."""
    lost = re.compile(r"\[[a-z#/@][^\[\]]*\]")
    found: list[str] = []
    for file in source_files("clawstream", "services"):
        text = file.read_text(encoding="utf-8")
        if "typer" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.keyword) or node.arg != "help":
                continue
            if isinstance(node.value, ast.Constant) and lost.search(str(node.value.value)):
                found.append(f"{file.relative_to(ROOT)}:{node.value.lineno}: {node.value.value}")
    assert found == []
