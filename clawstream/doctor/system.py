"""Checks of one system: its settings, model folders, ports and broker."""

import socket

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from clawstream.doctor.finding import Finding, Verdict
from clawstream.supervisor.preflight import Preflight
from clawstream.supervisor.report import running_supervisor
from clawstream.supervisor.settings import Service, SystemSettings

_CONNECT_SECONDS = 3.0


def check_broker(system: SystemSettings) -> list[Finding]:
    """Whether each bootstrap address accepts a connection, a broker answers, and what it advertises can be reached."""
    findings: list[Finding] = []
    addresses = [address.strip() for address in system.kafka.bootstrap_servers.split(",")]
    refused = {address: problem for address in addresses if (problem := connection_problem(address))}
    starts_it = any(process.service is Service.BROKER for process in system.processes)
    if starts_it and len(refused) == len(addresses) and running_supervisor(system.supervisor_directory) is None:
        told = "; ".join(f"{address}: {problem}" for address, problem in refused.items())
        return [Finding("broker", Verdict.NOTE, f"{told}: not started yet", "`clawstream up` starts it")]
    for address, problem in refused.items():
        verdict = Verdict.MISSING if len(refused) == len(addresses) else Verdict.NOTE
        remedy = "start it (`clawstream broker up`, or docker compose), or correct kafka.bootstrap_servers"
        findings.append(Finding("broker", verdict, f"{address}: {problem}", remedy))
    if len(refused) == len(addresses):
        return findings
    admin = AdminClient({**system.kafka.client_properties, "bootstrap.servers": ",".join(addresses), "log_level": 0})
    try:
        metadata = admin.list_topics(timeout=_CONNECT_SECONDS * 2)
    except KafkaException as error:
        remedy = "something else listens there, or it wants TLS or SASL (kafka.client_properties)"
        return [*findings, Finding("broker", Verdict.MISSING, f"{', '.join(addresses)}: {error}", remedy)]
    for broker in metadata.brokers.values():
        advertised = f"{broker.host}:{broker.port}"
        problem = connection_problem(advertised)
        if problem:
            detail = f"the broker answers, but tells clients to call {advertised}, which fails: {problem}"
            findings.append(Finding("broker", Verdict.MISSING, detail, "correct its advertised.listeners"))
    prefix = f"{system.kafka.namespace}."
    topics = sum(name.startswith(prefix) for name in metadata.topics)
    if not topics:
        findings.append(
            Finding("topics", Verdict.MISSING, f"none starts with {prefix!r}", "create them: `clawstream topics apply`")
        )
    if not findings:
        findings.append(Finding("broker", Verdict.OK, f"{', '.join(addresses)} answers; {topics} topics of ours"))
    return findings


def connection_problem(address: str) -> str | None:
    """Why a TCP connection to host:port fails, or None."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return "not host:port"
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def check_settings(preflight: Preflight) -> list[Finding]:
    """What `clawstream up` would refuse: wrong values, missing model folders, ports that are taken."""
    if not preflight.problems:
        names = ", ".join(preflight.processes) or "no service"
        return [Finding("settings", Verdict.OK, f"of {names}: values, model folders and ports")]
    return [
        Finding("settings", Verdict.MISSING, each, "correct it: `clawstream up` starts nothing before")
        for each in preflight.problems
    ]
