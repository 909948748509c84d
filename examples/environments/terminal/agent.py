"""What the policy is told, and what its answers mean."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from clawstream.chat_client import ChatAnswer

SYSTEM: Final = """\
You solve tasks in a Linux terminal. Answer with exactly one shell command in a code block:
```bash
ls
```
You then see its exit code and output, and answer with the next command. Every command starts in the same folder; only \
files last from one command to the next. There is no network. When the task is done, answer with the one word DONE."""

SYSTEM_WITH_TOOL: Final = """\
You solve tasks in a Linux terminal. Call the tool run_command with one shell command at a time and look at what comes \
of it. Every command starts in the same folder; only files last from one command to the next. There is no network. \
When the task is done, answer with the one word DONE."""

TOOL: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {
        "name": "run_command",
        "description": "Runs a shell command in the folder of the task and returns its exit code and output.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "For bash."}},
            "required": ["command"],
        },
    },
}
NO_COMMAND: Final = "There was no command in your answer. Give one in a ```bash code block, or say DONE."

_BLOCK: Final = re.compile(r"```[ \t]*(?:bash|sh|shell|console)?[ \t]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
_DONE: Final = re.compile(r"(?m)^\W*DONE\W*$")


@dataclass(frozen=True, slots=True)
class Move:
    """What the policy wants."""

    command: str | None
    """To be run; None when there is none."""
    done: bool
    """It says that the task is done."""
    tool_call_id: str | None = None
    """The call that the result answers, when it was a tool call."""
    ignored_call_ids: tuple[str, ...] = ()
    """Further tool calls of the same answer: one command at a time."""


def read_move(answer: ChatAnswer) -> Move:
    """The first tool call with a command, else the first code block, else DONE on a line of its own."""
    calls = answer.message.get("tool_calls") or []
    ids = tuple(str(call.get("id", "")) for call in calls)
    for call in calls:
        command = _command_of(call)
        if command is not None:
            own = str(call.get("id", ""))
            return Move(command, False, own, tuple(other for other in ids if other != own))
    if calls:
        return Move(None, False, ids[0], ids[1:])
    block = _BLOCK.search(answer.text)
    if block is not None and block[1].strip():
        return Move(_without_prompt(block[1].strip()), False)
    return Move(None, bool(_DONE.search(answer.text)))


def result_messages(move: Move, text: str) -> list[dict[str, Any]]:
    """How the policy is told what came of its move."""
    if move.tool_call_id is None:
        return [{"role": "user", "content": text}]
    ignored = [
        {"role": "tool", "tool_call_id": call_id, "content": "Not run: one command at a time."}
        for call_id in move.ignored_call_ids
    ]
    return [{"role": "tool", "tool_call_id": move.tool_call_id, "content": text}, *ignored]


def _command_of(call: Mapping[str, Any]) -> str | None:
    try:
        command = json.loads(call["function"]["arguments"])["command"]
    except (KeyError, TypeError, ValueError):
        return None
    return command if isinstance(command, str) and command.strip() else None


def _without_prompt(block: str) -> str:
    """Small models like to write the shell's prompt too."""
    return "\n".join(line.removeprefix("$ ") for line in block.splitlines())
