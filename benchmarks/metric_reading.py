"""Metrics of a process, as Prometheus would read them."""

import aiohttp
from prometheus_client.parser import text_string_to_metric_families


async def read_metrics(url: str, **labels: str) -> dict[str, float]:
    """Every sample with these labels that the process at `url` shows, by its name and summed over the other labels."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        answer.raise_for_status()
        text = await answer.text()
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if labels.items() <= sample.labels.items():
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values
