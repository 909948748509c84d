"""SGLang in a virtual environment of its own, kept outside the checkout.

It pins other versions of torch and transformers than clawstream does, and takes about 10 GB: one minute on a fast
network, five on a slow one. `constraints.txt` holds the exact versions; a change of it makes a new environment.
"""

import fcntl
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from clawstream.broker.installation import cache_directory
from clawstream.errors import MissingDependencyError

CONSTRAINTS = Path(__file__).with_name("constraints.txt")
OVERRIDES = Path(__file__).with_name("overrides.txt")
_NEEDED_BYTES = 16 * 10**9
"""The environment, and uv's downloads while it is made."""
_INSTALL_TIMEOUT_SECONDS = 1200.0
_COMPLETE = "complete"
"""A file in the environment, written last."""


class DiskTooSmall(MissingDependencyError):  # noqa: N818
    """The one lack that no script can remove: a skip everywhere, and it says so."""


def sglang_version() -> str:
    """The version that `constraints.txt` pins."""
    pins = dict(line.split("==", 1) for line in CONSTRAINTS.read_text().splitlines() if "==" in line)
    return pins["sglang"]


def ensure_sglang(environment: Mapping[str, str]) -> Path:
    """The Python that has SGLang; installs it the first time. Two processes that need it at once install it once.

    Raises DiskTooSmall, and MissingDependencyError when uv or network are missing.
    """
    python_version = f"{sys.version_info.major}.{sys.version_info.minor}"
    content = CONSTRAINTS.read_bytes() + OVERRIDES.read_bytes() + python_version.encode()
    directory = cache_directory(environment) / f"sglang-{sglang_version()}-{hashlib.sha256(content).hexdigest()[:12]}"
    python = directory / "bin" / "python"
    if (directory / _COMPLETE).is_file():
        return python
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(f"{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / _COMPLETE).is_file():
            shutil.rmtree(directory, ignore_errors=True)
            _install(directory, python, environment)
            (directory / _COMPLETE).touch()
    return python


def _install(directory: Path, python: Path, environment: Mapping[str, str]) -> None:
    free = shutil.disk_usage(directory.parent).free
    if free < _NEEDED_BYTES:
        raise DiskTooSmall(
            f"SGLang needs {_NEEDED_BYTES / 1e9:.0f} GB of disk in {directory.parent}, {free / 1e9:.0f} GB are free; "
            "free some, or set XDG_CACHE_HOME to another disk"
        )
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.is_file() else shutil.which("uv", path=environment.get("PATH"))
    if uv is None:
        raise MissingDependencyError("SGLang is installed with uv, which is not there: pip install uv")
    _run([uv, "venv", "--quiet", "--python", sys.executable, str(directory)], environment)
    requirements = [f"sglang=={sglang_version()}", "--constraints", str(CONSTRAINTS), "--overrides", str(OVERRIDES)]
    _run([uv, "pip", "install", "--quiet", "--python", str(python), *requirements], environment)


def _run(command: list[str], environment: Mapping[str, str]) -> None:
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_INSTALL_TIMEOUT_SECONDS,
            env={**environment, "UV_HTTP_TIMEOUT": "300"},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise MissingDependencyError(
            f"SGLang was not installed within {_INSTALL_TIMEOUT_SECONDS:.0f} seconds; is the network reachable?"
        ) from error
    if result.returncode != 0:
        tail = "\n".join((result.stdout + result.stderr).strip().splitlines()[-15:])
        raise MissingDependencyError(f"SGLang could not be installed ({Path(command[0]).name}):\n{tail}")
