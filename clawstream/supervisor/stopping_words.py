"""Words for whoever stops the system: how long a process may take, and what it means that it was killed. Pure."""

from collections.abc import Mapping
from datetime import datetime

from clawstream.supervisor.report import ProcessState, SupervisorReport
from clawstream.supervisor.settings import Service

_READ_AGAIN = "nothing is lost: what it had in hand is on the log, and the next start reads it again"
_CONSEQUENCES: Mapping[Service, str] = {
    Service.BROKER: "nothing is lost that it had acknowledged: the next start checks its files, and takes longer",
    Service.TOPICS: "nothing is lost: the next start makes the topics that are missing",
    Service.ENGINE: "nothing is lost but the answers that it was giving",
    Service.GATEWAY: (
        "nothing that was acknowledged is lost: it is in the outbox, and the next start writes it to the log; answers "
        "under way broke off"
    ),
    Service.JUDGE: _READ_AGAIN,
    Service.TEACHER: _READ_AGAIN,
    Service.TRAINER: (
        "nothing is lost: the step in hand was not finished, and the next start reads its samples again, from the "
        "newest checkpoint"
    ),
    Service.COMMAND: "what that means is for its own documentation to say: it is none of clawstream's services",
}


def stopping_words(seconds: float) -> str:
    """Of a process that was told to end and has so long for it."""
    return f"told to end; killed if it still runs after {seconds:g} seconds"


def overdue_words(seconds: float) -> str:
    """Of one that took longer."""
    return f"did not end within {seconds:g} seconds, and was killed"


def kill_consequence(service: Service) -> str:
    """For whoever stopped the system, in one sentence."""
    return _CONSEQUENCES[service]


def still_ending(report: SupervisorReport, now: datetime) -> str:
    """Who is waited for now, and for how long at most; empty when nobody is."""
    told: list[str] = []
    for process in report.processes:
        if process.state is not ProcessState.STOPPING:
            continue
        limit = ""
        if process.kill_at is not None:
            seconds = (process.kill_at - now).total_seconds()
            limit = f" (at most {seconds:.0f} s more)" if seconds > 0 else " (being killed)"
        told.append(f"{process.name}{limit}")
    return f"waiting for the end of {', '.join(told)}" if told else ""
