"""A comparison as a table for the terminal, as JSON, and as one HTML page without anything to load."""

from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from typing import Any

import orjson
from rich.table import Table

from services.judge.replay.call_store import CallCosts
from services.judge.replay.comparison import Comparison
from services.judge.replay.statistics import VERDICTS, Verdict

_ROWS: tuple[Verdict, ...] = (*VERDICTS, None)


def document(comparison: Comparison) -> dict[str, Any]:
    """For programs."""
    values = asdict(comparison)
    agreement = values["agreement"]
    agreement["confusion"] = [
        {"old": old, "new": new, "count": count}
        for (old, new), count in sorted(
            comparison.agreement.confusion.items(), key=lambda each: (str(each[0][0]), str(each[0][1]))
        )
    ]
    agreement["sign_flips"] = comparison.agreement.sign_flips
    return {**values, "coverage": comparison.coverage}


def json_report(comparison: Comparison) -> bytes:
    """The document as JSON."""
    return orjson.dumps(document(comparison), option=orjson.OPT_INDENT_2)


def facts(comparison: Comparison) -> list[tuple[str, str]]:
    """What a person wants to know, in order."""
    agreement = comparison.agreement
    return [
        ("new spec", comparison.new_spec_hash),
        ("old spec", ", ".join(f"{each} ({count})" for each, count in comparison.old_spec_hashes.items()) or "none"),
        (
            "inputs scored: old, new, both",
            f"{comparison.inputs_old}, {comparison.inputs_new}, {comparison.inputs_both}",
        ),
        ("coverage", _share(comparison.coverage)),
        ("of these explicit evidence", str(comparison.explicit)),
        ("compared verdicts", str(agreement.compared)),
        ("agreement", _share(agreement.agreement)),
        ("Cohen's kappa", _number(agreement.kappa)),
        (
            "sign flips",
            f"{agreement.sign_flips} ({agreement.flips_to_positive} to +1, {agreement.flips_to_negative} to -1)",
        ),
        ("failed: old, new", f"{agreement.failed_old}, {agreement.failed_new}"),
        ("mean verdict: old, new", f"{_number(agreement.mean_old)}, {_number(agreement.mean_new)}"),
        ("calls of the old spec", _cost(comparison.cost_old)),
        ("calls of the new spec", _cost(comparison.cost_new)),
        ("of these paid by this replay", _cost(comparison.paid_by_replay)),
    ]


def tables(comparison: Comparison) -> list[Table]:
    """For the terminal: facts, confusion, the worst disagreements."""
    summary = Table(box=None, show_header=False)
    for name, value in facts(comparison):
        summary.add_row(name, value)
    confusion = Table("old \\ new", *(_verdict(new) for new in _ROWS), box=None)
    for old in _ROWS:
        confusion.add_row(_verdict(old), *(str(comparison.agreement.confusion.get((old, new), 0)) for new in _ROWS))
    worst = Table("next state", "old", "new", "answer", "what followed", box=None)
    for each in comparison.worst:
        worst.add_row(
            each.next_state_id,
            f"{_verdict(each.old_verdict)} of {_votes(each.old_votes)}",
            f"{_verdict(each.new_verdict)} of {_votes(each.new_votes)}",
            _line(each.answer),
            _line(each.following),
        )
    return [summary, confusion, worst]


def html_report(comparison: Comparison) -> str:
    """One page. Everything that people or models wrote is escaped."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts(comparison))
    heads = "".join(f"<th>{escape(_verdict(new))}</th>" for new in _ROWS)
    confusion = "".join(
        f"<tr><th>{escape(_verdict(old))}</th>"
        + "".join(f"<td>{comparison.agreement.confusion.get((old, new), 0)}</td>" for new in _ROWS)
        + "</tr>"
        for old in _ROWS
    )
    worst = "".join(
        f"<tr><td><code>{escape(each.next_state_id)}</code><br>{escape(each.reference)}</td>"
        f"<td>{escape(_verdict(each.old_verdict))} of {escape(_votes(each.old_votes))}</td>"
        f"<td>{escape(_verdict(each.new_verdict))} of {escape(_votes(each.new_votes))}</td>"
        f"<td><pre>{escape(each.answer)}</pre></td><td><pre>{escape(each.following)}</pre></td></tr>"
        for each in comparison.worst
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>replay {escape(comparison.name)}</title>"
        "<style>body{font:15px/1.5 system-ui,sans-serif;margin:2em;max-width:80em}table{border-collapse:collapse;"
        "margin-bottom:2em}th,td{border:1px solid #ccc;padding:.3em .6em;text-align:left;vertical-align:top}"
        "pre{white-space:pre-wrap;margin:0;max-width:32em}</style></head><body>"
        f"<h1>Replay {escape(comparison.name)}</h1><table>{rows}</table>"
        f"<h2>Old verdicts (rows) and new ones</h2><table><tr><th></th>{heads}</tr>{confusion}</table>"
        "<h2>The worst disagreements</h2><table><tr><th>next state</th><th>old</th><th>new</th><th>answer</th>"
        f"<th>what followed</th></tr>{worst}</table></body></html>\n"
    )


def _cost(cost: CallCosts) -> str:
    return f"{cost.calls} ({cost.prompt_tokens} tokens read, {cost.completion_tokens} written, {cost.seconds:.1f} s)"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _verdict(value: Verdict) -> str:
    return "failed" if value is None else f"{value:+d}" if value else "0"


def _votes(votes: Sequence[Verdict]) -> str:
    return " ".join("-" if vote is None else f"{vote:+d}" if vote else "0" for vote in votes) or "none"


def _line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"
