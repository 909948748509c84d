"""The operations port of a process: /healthz, /readyz, /status and /metrics, on a thread of its own.

Liveness differs from readiness: a process that waits for its broker or loads a model is alive and not ready.
"""

import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson

from clawstream.metrics import Metrics


class OperationsServer:
    """Serves until closed. `ready` and `status` are called from its threads and must be thread-safe and quick."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        metrics: Metrics,
        ready: Callable[[], bool],
        status: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Binds at once. Raises OSError when the port is taken."""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/healthz":
                    self._answer(200, b'{"alive":true}')
                elif self.path == "/readyz":
                    is_ready = ready()
                    self._answer(200 if is_ready else 503, orjson.dumps({"ready": is_ready}))
                elif self.path == "/status":
                    self._answer(200, orjson.dumps(dict(status()), option=orjson.OPT_NON_STR_KEYS))
                elif self.path == "/metrics":
                    self._answer(200, metrics.exposition(), content_type="text/plain; version=0.0.4")
                else:
                    self._answer(404, b'{"error":"no such path"}')

            def _answer(self, code: int, body: bytes, content_type: str = "application/json") -> None:
                self.send_response(code)
                self.send_header("content-type", content_type)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Probes are not worth a line each."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="operations", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that is bound."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
