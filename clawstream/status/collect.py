"""Brings together what the supervisor, the processes and the log say."""

import httpx
from prometheus_client.parser import text_string_to_metric_families

from clawstream.bus.interface import Bus
from clawstream.clock import Clock
from clawstream.errors import BusError, DecodeError
from clawstream.status.log_reading import read_log
from clawstream.status.snapshot import MetricSample, Snapshot
from clawstream.supervisor.leftovers import is_alive
from clawstream.supervisor.report import ProcessReport, SupervisorReport, read_report, running_supervisor
from clawstream.supervisor.settings import Service, SystemSettings

_SCRAPE_SECONDS = 2.0


def take_snapshot(settings: SystemSettings, bus: Bus, clock: Clock) -> Snapshot:
    """What can be known now. A log or a process that does not answer is part of the picture, not an error."""
    supervisor = running_supervisor(settings.supervisor_directory)
    report = read_report(settings.supervisor_directory)
    samples: list[MetricSample] = []
    silent: list[str] = []
    alive = [process for process in (report.processes if report else []) if is_alive(process)]
    for process in alive:
        if process.metrics_url is None:
            continue
        found = scrape(process)
        if found is None:
            silent.append(process.name)
        else:
            samples += found
    snapshot = Snapshot(
        taken_at=clock.now(),
        supervisor_pid=supervisor.pid if supervisor else None,
        report=report,
        log=None,
        metrics=samples,
        silent=silent,
        alive=[process.name for process in alive],
    )
    if snapshot.is_down and report is not None and _has_broker(report):
        return snapshot  # Nobody answers for the log, and waiting for it would only take time.
    try:
        log = read_log(bus, settings.kafka.namespace, settings.policy, clock.now())
    except (BusError, DecodeError) as error:
        return snapshot.model_copy(update={"log_problem": str(error)})
    return snapshot.model_copy(update={"log": log})


def _has_broker(report: SupervisorReport) -> bool:
    return any(process.service == Service.BROKER for process in report.processes)


def scrape(process: ProcessReport) -> list[MetricSample] | None:
    """The metrics of a process, or None when it does not answer."""
    assert process.metrics_url is not None
    try:
        answer = httpx.get(process.metrics_url, timeout=_SCRAPE_SECONDS, trust_env=False)
        answer.raise_for_status()
    except httpx.HTTPError:
        return None
    return [
        MetricSample(process=process.name, name=sample.name, labels=dict(sample.labels), value=float(sample.value))
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    ]
