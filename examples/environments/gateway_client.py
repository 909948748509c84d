"""The gateway as an environment sees it: chat with a place in a rollout, and the rollout's outcome."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clawstream.chat_client import ChatAnswer, ChatClient

RECORDED_HEADER = "x-clawstream-recorded"


@dataclass(frozen=True, slots=True)
class Step:
    """Where a turn stands."""

    task_id: str
    group_id: str
    """The rollouts of one task that are compared with each other."""
    rollout_id: str
    index: int
    """From 0 on."""

    @property
    def headers(self) -> dict[str, str]:
        """How the gateway is told. The rollout is a session of its own."""
        return {
            "X-Task-Id": self.task_id,
            "X-Group-Id": self.group_id,
            "X-Rollout-Id": self.rollout_id,
            "X-Step-Index": str(self.index),
            "X-Session-Id": self.rollout_id,
        }


def is_recorded(answer: ChatAnswer) -> bool:
    """Whether the turn is on the log. Only the gateway says no."""
    return answer.headers.get(RECORDED_HEADER, "true") == "true"


async def post_outcome(
    client: ChatClient,
    rollout_id: str,
    score: float,
    *,
    source: str,
    steps: int,
    step_scores: Sequence[float | None] = (),
) -> int:
    """Tells how a rollout ended: `score` from -1 to 1, and apart from it what single steps were worth.

    `steps` is the number of recorded turns: the gateway refuses until it knows so many. Returns how many turns learned
    of the outcome. A repetition changes nothing. Raises as `ChatClient.chat` does.
    """
    body: dict[str, Any] = {"rollout_id": rollout_id, "score": score, "source": source, "steps": steps}
    if any(one is not None for one in step_scores):
        body["step_scores"] = list(step_scores)
    answer = await client.post("feedback", body, {})
    return len(answer.json()["next_state_ids"])
