"""Installs clients outside the checkout: once per pinned version, whole or not at all, one process at a time."""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from clawstream.broker.installation import cache_directory
from tests.fixtures.broker import missing

VERSIONS = Path(__file__).with_name("versions.toml")
INSTALL_SECONDS = 600


def pinned(group: str) -> dict[str, str]:
    """Packages and versions of one entry of versions.toml."""
    return tomllib.loads(VERSIONS.read_text(encoding="utf-8"))[group]


def node_executable() -> Path:
    """The pinned Node: npm's package `node`, whose own dependency is the program itself. Needs any npm."""
    folder = npm_folder("node", ())
    return folder / "node_modules" / "node" / "bin" / "node"


def npm_folder(group: str, options: tuple[str, ...] = ("--ignore-scripts",)) -> Path:
    """Folder whose `node_modules` holds the packages of `group`. Node has one of its own: npm removes it elsewhere."""
    npm = shutil.which("npm")
    if npm is None:
        missing("npm is not on the path: the lane tests/clients/agents needs it (Debian, Ubuntu: apt-get install npm)")

    def install(folder: Path) -> None:
        (folder / "package.json").write_text(json.dumps({"private": True, "dependencies": pinned(group)}))
        _run([npm, "install", "--no-audit", "--no-fund", "--loglevel=error", *options], folder)

    return _installed(group, install)


def python_environment(group: str, *, newest: tuple[int, int] | None = None) -> Path:
    """The Python of a virtual environment that holds the packages of `group`: agents pin much that we do not want.

    `newest` is the newest Python that they can be installed for.
    """
    maker = python_up_to(group, newest)

    def install(folder: Path) -> None:
        _run([maker, "-m", "venv", str(folder)], folder)
        packages = [f"{name}=={version}" for name, version in pinned(group).items()]
        python = str(folder / "bin" / "python")
        uv = subprocess.run([sys.executable, "-m", "uv", "--version"], capture_output=True, check=False)
        installer = (
            [sys.executable, "-m", "uv", "pip", "install", "--python", python]
            if uv.returncode == 0
            else [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        )
        _run([*installer, *packages], folder)

    # Scripts in an environment name its folder, so that it cannot be moved into place: it is made where it stays.
    return _installed(group, install, moves=False) / "bin" / "python"


def python_up_to(group: str, newest: tuple[int, int] | None) -> str:
    """Ours, or an older one on the path. Without one `group` is skipped, in CI too: no registry has Pythons."""
    if newest is None or sys.version_info[:2] <= newest:
        return sys.executable
    for minor in range(newest[1], 9, -1):
        if found := shutil.which(f"python{newest[0]}.{minor}"):
            return found
    pytest.skip(f"{group} needs Python {newest[0]}.{newest[1]} or older, and none is on the path")


def _installed(group: str, install: Callable[[Path], None], *, moves: bool = True) -> Path:
    digest = hashlib.sha256(json.dumps(pinned(group), sort_keys=True).encode()).hexdigest()[:12]
    cache = cache_directory(os.environ) / "clients"
    folder, complete = cache / f"{group}-{digest}", cache / f"{group}-{digest}.complete"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{group}-{digest}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if complete.exists():
            return folder
        working = folder.with_name(f"{folder.name}.partial") if moves else folder
        for left in (working, folder):
            shutil.rmtree(left, ignore_errors=True)
        working.mkdir()
        try:
            install(working)
        except (OSError, subprocess.SubprocessError) as error:
            output = getattr(error, "stderr", None) or b""
            missing(f"{group} cannot be installed: {error}\n{output.decode(errors='replace')[-2000:]}")
        if moves:
            working.rename(folder)
        complete.touch()
    return folder


def _run(command: list[str], folder: Path) -> None:
    environment: Mapping[str, str] = {**os.environ, "CI": "true"}
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True, timeout=INSTALL_SECONDS)
