"""A real SGLang on this machine's CPU, as a process of its own."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from clawstream.process_identity import free_ports

WITHOUT_GPU = Path(__file__).with_name("without_gpu")
"""The folder with what stands in for SGLang's GPU kernels, and with the list of models to import."""
FLAGS = (
    *("--incremental-streaming-output", "--weight-version", "0"),
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--dtype", "float32"),
    *("--mem-fraction-static", "0.2", "--max-total-tokens", "20000", "--disable-overlap-schedule"),
    *("--skip-server-warmup", "--sleep-on-idle", "--host", "127.0.0.1"),
)
"""The first line is what clawstream asks for everywhere; the rest is what a CPU needs. The radix cache stays on."""
_START_SECONDS = 900.0
"""25 seconds on a quiet machine; minutes the first time on a busy one."""
_TAIL_COLUMNS = 300
_STOP_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class SglangServer:
    """A server that answers."""

    url: str
    model_directory: Path
    """What it was started with: version 0."""
    log: Path


@contextmanager
def running_sglang(
    python: Path, model_directory: Path, log: Path, environment: Mapping[str, str]
) -> Iterator[SglangServer]:
    """Starts a server and ends it, with all processes that it started."""
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [str(python), "-m", "sglang.launch_server", "--model-path", str(model_directory), "--port", str(port)]
    own = {name: value for name, value in environment.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    own |= {
        "PYTHONPATH": str(WITHOUT_GPU),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "served_models",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *FLAGS], stdout=output, stderr=subprocess.STDOUT, env=own, start_new_session=True
        )
    try:
        _wait_until_it_answers(process, url, log)
        yield SglangServer(url, model_directory, log)
    finally:
        _end(process)


def _wait_until_it_answers(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        with contextlib.suppress(httpx.TransportError):
            # /model_info answers before the scheduler does; /server_info asks the scheduler.
            if httpx.get(f"{url}/server_info", timeout=10.0).status_code == 200:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            tail = "\n".join(line[:_TAIL_COLUMNS] for line in log.read_text(errors="replace").splitlines()[-40:])
            raise AssertionError(f"SGLang did not start (exit code {process.poll()}):\n{tail}")
        time.sleep(0.2)  # another process: there is no event to await


def _end(process: subprocess.Popen[bytes]) -> None:
    """SGLang's own processes are in the session that was made for it, and nobody else is."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
