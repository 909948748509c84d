"""Checks of one system: its settings, model folders, ports and broker."""

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from clawstream.doctor.finding import Finding, Verdict
from clawstream.process_identity import describe_port_owner, is_port_free
from clawstream.supervisor.report import running_supervisor
from clawstream.supervisor.settings import SystemSettings

_CONNECT_SECONDS = 3.0


def check_broker(system: SystemSettings) -> list[Finding]:
    """Whether each bootstrap address accepts a connection, a broker answers, and what it advertises can be reached."""
    findings: list[Finding] = []
    addresses = [address.strip() for address in system.kafka.bootstrap_servers.split(",")]
    refused = {address: problem for address in addresses if (problem := connection_problem(address))}
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


def check_ports(system: SystemSettings, document: Mapping[str, Any]) -> list[Finding]:
    """Whether the ports of `[[processes]]` are free; while our supervisor runs they are ours."""
    if running_supervisor(system.supervisor_directory) is not None:
        return [Finding("ports", Verdict.OK, "in use by our own supervisor")]
    findings: list[Finding] = []
    users: dict[int, str] = {}
    for process in system.processes:
        values = {**cast("Mapping[str, Any]", document.get(process.service.value, {})), **process.overrides}
        port = values.get("port")
        if not isinstance(port, int) or port == 0:
            continue
        if port in users:
            detail = f"{port} is wanted by {users[port]} and by {process.name}"
            findings.append(Finding("ports", Verdict.MISSING, detail, f"give {process.name} another in its overrides"))
        elif not is_port_free(port):
            detail = f"{port}, wanted by {process.name}, is taken by {describe_port_owner(port)}"
            findings.append(Finding("ports", Verdict.MISSING, detail, "stop that process or choose another port"))
        users[port] = process.name
    if users and not findings:
        findings.append(Finding("ports", Verdict.OK, f"{', '.join(map(str, users))} are free"))
    return findings


def check_models(system: SystemSettings, document: Mapping[str, Any], base: Path) -> list[Finding]:
    """Whether the model folders that the file names exist and look like Hugging Face models."""
    folders: dict[Path, str] = {}
    for process in system.processes:
        section = process.service.value
        values = {**cast("Mapping[str, Any]", document.get(section, {})), **process.overrides}
        for setting, value in _model_settings(section, values):
            folders.setdefault(base / value, setting)
    findings: list[Finding] = []
    for folder, setting in folders.items():
        if (folder / "config.json").is_file():
            findings.append(Finding("model", Verdict.OK, str(folder)))
        else:
            remedy = f"`clawstream models fetch smollm2 --directory {folder}`, or correct {setting}"
            findings.append(Finding("model", Verdict.MISSING, f"{folder} holds no config.json", remedy))
    return findings


def _model_settings(section: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Settings that name a model's folder: trainer `model`, engine `model_path`, judge `model.directory`.

    Remote addresses are not folders.
    """
    for key in ("model", "model_path", "model_directory"):
        value = values.get(key)
        if isinstance(value, Mapping):
            key, value = f"{key}.directory", cast("Mapping[str, Any]", value).get("directory")
        if isinstance(value, str) and "://" not in value:
            yield f"{section}.{key}", value
