"""Arrows point one way: services -> clawstream -> schemas, and torch stays in trainer and engine."""

import subprocess
import sys

import pytest

from tests.unit.architecture.source_tree import (
    ROOT,
    TORCH_SERVICES,
    file_of,
    imported_modules,
    imports_of,
    module_name,
    source_files,
)

SERVICES = sorted(folder.name for folder in (ROOT / "services").iterdir() if (folder / "__init__.py").exists())


def offenders(package: str, forbidden: tuple[str, ...]) -> list[str]:
    return [
        f"{module_name(file)} imports {module}"
        for file in source_files(package)
        for module in sorted(imported_modules(file))
        if any(module == prefix or module.startswith(f"{prefix}.") for prefix in forbidden)
    ]


def test_schemas_import_nothing_of_ours() -> None:
    assert offenders("schemas", ("clawstream", "services")) == []


def test_the_core_imports_no_service() -> None:
    assert offenders("clawstream", ("services",)) == []


@pytest.mark.parametrize("service", SERVICES)
def test_services_do_not_import_each_other(service: str) -> None:
    others = tuple(f"services.{other}" for other in SERVICES if other != service)
    assert offenders(f"services/{service}", others) == []


def test_product_code_does_not_import_tests_or_examples() -> None:
    for package in ("schemas", "clawstream", "services"):
        assert offenders(package, ("tests", "examples", "benchmarks")) == []


@pytest.mark.parametrize("example", ["environments", "homework"])
def test_environments_are_clients_that_could_run_anywhere(example: str) -> None:
    assert list(source_files(f"examples/{example}"))
    assert offenders(f"examples/{example}", ("services", "schemas", "clawstream.bus", "clawstream.worker")) == []


IMPORT_WITHOUT_TORCH = """
import importlib, sys

# As on a machine without them: an import fails, and who only asks whether they are there is told no.
absent = ("torch", "megatron", "mbridge")
sys.modules.update(dict.fromkeys(absent))
for module in sys.argv[1:]:
    importlib.import_module(module)
assert [sys.modules[name] for name in absent] == [None] * 3
sys.stdout.write(f"{len(sys.argv) - 1} modules")
"""


def test_everything_but_trainer_and_engine_imports_without_torch() -> None:
    modules = [
        name
        for file in source_files("clawstream", "schemas", "services")
        if not (name := module_name(file)).startswith(TORCH_SERVICES)
    ]
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_WITHOUT_TORCH, *modules], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout == f"{len(modules)} modules"


def test_what_is_absent_cannot_be_imported() -> None:
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_WITHOUT_TORCH, "torch"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    assert "import of torch halted" in result.stderr


def test_unit_and_contract_tests_import_no_torch() -> None:
    """Nor does what they import: it takes seconds for each process of a run. What computes is in tests/numerics."""
    imported_by = dict.fromkeys(source_files("tests/unit", "tests/contracts", "tests/fixtures"), "")
    imported_by[ROOT / "tests" / "conftest.py"] = ""
    to_visit = list(imported_by)
    found: list[str] = []
    while to_visit:
        file = to_visit.pop()
        name = module_name(file)
        for module in sorted(imports_of(file).at_start):
            if module.partition(".")[0] in ("torch", "megatron", "mbridge"):
                found.append(f"{name} imports {module}; it is imported by {imported_by[file] or 'nothing'}")
            parts = module.split(".")
            for end in range(1, len(parts) + 1):  # the packages around it come first
                reached = file_of(".".join(parts[:end]))
                if reached is not None and reached not in imported_by:
                    imported_by[reached] = name
                    to_visit.append(reached)
    assert found == []
    assert ROOT / "services" / "gateway" / "app.py" in imported_by, "the search does not reach the services"
