"""Rendering in a process of its own, that has torch at hand and does not take it."""

import subprocess
import sys
from pathlib import Path

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def test_loading_and_rendering_need_no_torch_and_no_network(tiny_model_directory: Path) -> None:
    script = f"""
import socket, sys
def refuse(*arguments, **keywords):
    raise AssertionError("network")
socket.socket.connect = refuse
socket.getaddrinfo = refuse
from pathlib import Path
from clawstream.rendering.renderer import load_renderer
renderer = load_renderer(Path({str(tiny_model_directory)!r}))
prompt = renderer.render([{{"role": "user", "content": "hi"}}], [{LOOK!r}])
renderer.parse(renderer.encode("hello"), prompt.token_ids)
assert "torch" not in sys.modules, "torch was imported"
print(len(prompt.token_ids))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 0
