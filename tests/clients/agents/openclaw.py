"""OpenClaw's command line with a configuration of its own: one call of `say` is one user message."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.agents.agent_gateway import run_client

WIDE_CONTEXT_TOKENS = 400_000


@dataclass
class OpenClaw:
    """An agent of one workspace."""

    node: Path
    installation: Path
    home: Path
    base_url: str

    @property
    def workspace(self) -> Path:
        """Where its tools work."""
        return self.home / "workspace"

    async def say(self, words: str, *, session: str, context_tokens: int = WIDE_CONTEXT_TOKENS) -> str:
        """Sends a user message and waits for the end of the turn. A small context makes OpenClaw compact before it."""
        self.workspace.mkdir(parents=True, exist_ok=True)
        (self.home / "openclaw.json").write_text(json.dumps(self._configuration(context_tokens)))
        program = self.installation / "node_modules" / "openclaw" / "openclaw.mjs"
        command = [str(self.node), str(program), "agent", "--local", "--json", "--session-id", session]
        return await run_client(
            [*command, "--message", words],
            folder=self.home,
            environment={
                "HOME": str(self.home),
                "OPENCLAW_STATE_DIR": str(self.home / "state"),
                "OPENCLAW_CONFIG_PATH": str(self.home / "openclaw.json"),
            },
        )

    def _configuration(self, context_tokens: int) -> dict[str, Any]:
        model = {
            "id": "policy",
            "name": "policy",
            "reasoning": False,
            "input": ["text"],
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
            "contextWindow": context_tokens,
            "maxTokens": 1024,
        }
        provider = {
            "baseUrl": f"{self.base_url}/v1",
            "apiKey": "unused",
            "api": "openai-completions",
            "models": [model],
        }
        return {
            "agents": {
                "defaults": {
                    "model": {"primary": "clawstream/policy"},
                    "workspace": str(self.workspace),
                    "compaction": {"mode": "default", "keepRecentTokens": 100},
                }
            },
            "models": {"mode": "merge", "providers": {"clawstream": provider}},
        }
