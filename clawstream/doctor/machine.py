"""Checks of the machine itself: Python, packages, Java, disk, memory, GPU."""

import importlib.util
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from clawstream.broker.installation import find_java, resolve_kafka_jars
from clawstream.doctor.finding import Finding, Verdict
from clawstream.errors import MissingDependencyError
from clawstream.memory_need import MemoryNeed

EXTRA_MODULES: Mapping[str, tuple[str, ...]] = {
    "gateway": ("fastapi", "uvicorn", "uvloop", "renderers", "transformers", "cachetools"),
    "judge": ("renderers", "transformers"),
    "teacher": ("renderers", "transformers", "cachetools"),
    "engine": ("fastapi", "uvicorn", "uvloop", "torch", "transformers", "safetensors", "gguf", "accelerate"),
    "trainer": ("torch", "megatron", "mbridge", "einops", "transformers", "safetensors"),
    "archives": ("pyarrow",),
    "audit": ("kafka", "zstandard"),
    "demo": ("matplotlib",),
}
"""Import names of what each extra of the package installs."""

_SMALLEST_DISK_BYTES = 5 * 1024**3
_GIBIBYTE = 1024**3


def check_python() -> Finding:
    """Which Python runs. Its lowest version is the package's own business: an older one cannot install it."""
    return Finding("python", Verdict.OK, f"{platform.python_version()} at {sys.executable}")


def check_extras() -> list[Finding]:
    """Whether each extra's packages can be imported. Nothing is imported."""
    findings: list[Finding] = []
    for extra, modules in EXTRA_MODULES.items():
        lacking = [module for module in modules if importlib.util.find_spec(module) is None]
        if lacking:
            detail = f"without {', '.join(lacking)}"
            findings.append(Finding(extra, Verdict.MISSING, detail, f"pip install 'clawstream[{extra}]'"))
        else:
            findings.append(Finding(extra, Verdict.OK, f"{len(modules)} packages"))
    return findings


def check_java(environment: Mapping[str, str]) -> Finding:
    """Java 17 or newer, for Kafka on this machine."""
    try:
        java = find_java(environment)
    except MissingDependencyError as error:
        return Finding("java", Verdict.MISSING, *_split(error))
    return Finding("java", Verdict.OK, f"{java.version} at {java.executable}")


def check_kafka_jars(environment: Mapping[str, str]) -> Finding:
    """Kafka's jars; fetches them when they are not there, as the first start would."""
    try:
        return Finding("kafka jars", Verdict.OK, str(resolve_kafka_jars(environment)))
    except MissingDependencyError as error:
        return Finding("kafka jars", Verdict.MISSING, *_split(error))


def check_disk(directory: Path) -> Finding:
    """Room for the log, weights and checkpoints."""
    existing = next(parent for parent in (directory, *directory.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    detail = f"{free / _GIBIBYTE:.1f} GiB free under {existing}"
    if free >= _SMALLEST_DISK_BYTES:
        return Finding("disk", Verdict.OK, detail)
    return Finding("disk", Verdict.NOTE, detail, "weights and checkpoints fill it soon; set data_directory elsewhere")


def check_memory(needs: Mapping[str, MemoryNeed], *, available_bytes: int) -> Finding:
    """Whether the processes, by name, fit into the memory that is available now. Estimates, so nothing is refused."""
    detail = f"{available_bytes / _GIBIBYTE:.1f} GiB available"
    if not needs:
        return Finding("memory", Verdict.OK, detail)
    fixed = sum(need.fixed_bytes for need in needs.values())
    most = fixed + sum(need.working_bytes for need in needs.values())
    largest = sorted(needs, key=lambda name: -needs[name].fixed_bytes - needs[name].working_bytes)[:3]
    told = ", ".join(
        f"{name} {needs[name].fixed_bytes / _GIBIBYTE:.1f} to "
        f"{(needs[name].fixed_bytes + needs[name].working_bytes) / _GIBIBYTE:.1f}"
        for name in largest
    )
    detail += f"; the processes take about {fixed / _GIBIBYTE:.1f} from the start and at most {most / _GIBIBYTE:.1f}"
    detail += f" (the largest: {told})"
    if fixed > available_bytes:
        remedy = "it will not fit: take a smaller model, dtype = 'bfloat16' or trainer.lora, or end other programs"
        return Finding("memory", Verdict.MISSING, detail, remedy)
    if most > available_bytes:
        remedy = (
            "it may not fit under load: lower trainer.tokens_per_micro_batch, engine.max_slots or "
            "engine.max_context_tokens"
        )
        return Finding("memory", Verdict.NOTE, detail, remedy)
    return Finding("memory", Verdict.OK, detail)


def has_gpu(environment: Mapping[str, str]) -> bool:
    """Whether the driver of an NVIDIA GPU is installed."""
    return shutil.which("nvidia-smi", path=environment.get("PATH")) is not None


def check_gpu(environment: Mapping[str, str]) -> Finding:
    """Whether there is an NVIDIA GPU. None is needed."""
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        return Finding("gpu", Verdict.OK, "none: the CPU engine serves and the trainer runs on gloo")
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("gpu", Verdict.NOTE, f"nvidia-smi does not answer: {error}", "check the NVIDIA driver")
    names = answer.stdout.strip().splitlines()
    return Finding("gpu", Verdict.OK, f"{len(names)}: {'; '.join(names)}")


def _split(error: MissingDependencyError) -> tuple[str, str]:
    """Detail and remedy of an error that says both: the remedy is what follows the first sentence."""
    detail, _, remedy = str(error).partition(". ")
    return detail, remedy
