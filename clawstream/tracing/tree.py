"""A chain as a tree for the terminal."""

from collections.abc import Mapping
from typing import Any

from rich.tree import Tree

_TEXT_CHARACTERS = 100


def chain_tree(document: Mapping[str, Any]) -> Tree:
    """What `clawstream.tracing.chain.trace` returned, drawn: turns with their evidence, steps, versions."""
    tree = Tree(f"{document['kind']} {document['id']}")
    for turn in document["turns"]:
        _add_turn(tree, turn)
    for step in document["steps"]:
        _add_step(tree, step)
    for version in document["versions"]:
        _add_version(tree, version)
    return tree


def _add_turn(tree: Tree, found: Mapping[str, Any]) -> None:
    turn = found["turn"]
    branch = tree.add(f"turn {found['turn_id']}")
    if turn is None:
        branch.add("no longer on the log")
    else:
        branch.add(f"session {turn['session_id']}, by {turn['principal']}, at {turn['ref']}, {turn['finished_at']}")
        branch.add(f"asked: {_short(turn['request'])}")
        branch.add(f"answered ({turn['response_tokens']} tokens of {_spans(turn)}): {_short(turn['answer'])}")
        if not turn["trainable"]:
            branch.add(f"never trained: {turn['untrainable_reason']}")
    for next_state in found["next_states"]:
        scores = [each for each in found["scores"] if each["next_state_id"] == next_state["next_state_id"]]
        below = branch.add(f"{next_state['kind']} {next_state['next_state_id']} at {next_state['ref']}")
        for message in next_state["following"]:
            below.add(f"{message['role']}: {_short(message['text'])}")
        if next_state["feedback"] is not None:
            feedback = next_state["feedback"]
            below.add(f"{feedback['source']} gave {feedback['score']:+g} {_short(feedback['text'] or '')}".rstrip())
        for score in scores:
            _add_score(below, score, found["samples"])
        if not scores:
            below.add("no score")
    for each in found["trained"]:
        made = "changed nothing" if each["weight_version"] is None else f"made version {each['weight_version']}"
        branch.add(
            f"trained in step {each['step']} of {each['lineage']} ({made}), reward {_number(each['reward'])}, "
            f"age {each['age']}, sample {each['sample_id']}"
        )
    for each in found["dropped"]:
        branch.add(f"not trained in step {each['step']}: {each['reason']} {each['detail']}, sample {each['sample_id']}")


def _add_score(branch: Tree, score: Mapping[str, Any], samples: list[Mapping[str, Any]]) -> None:
    verdict = "failed" if score["verdict"] is None else f"{score['verdict']:+d}"
    votes = " ".join(str(vote.get("verdict", vote.get("abstention"))) for vote in score["votes"])
    kind = "explicit" if score["explicit"] else f"votes {votes}"
    below = branch.add(
        f"score {verdict} ({kind}{', tied' if score['tied'] else ''}) by {score['judge_spec_hash']}, "
        f"epoch {score['promotion_epoch']}, {score['score_id']}"
    )
    for hint in score["hints"]:
        below.add(f"hint of the {hint['source']}: {_short(hint['text'])}")
    for sample in samples:
        if (sample["score_id"], sample["revision"]["promotion_epoch"]) != (score["score_id"], score["promotion_epoch"]):
            continue
        revision = sample["revision"]
        leaf = below.add(
            f"sample {sample['sample_id']}, reward {_number(sample['reward'])}, revision "
            f"{revision['promotion_epoch']}/{'explicit' if revision['explicit'] else 'implicit'}/"
            f"{revision['next_state_offset']}, at {sample['ref']}"
        )
        if sample["teacher"] is not None:
            teacher = sample["teacher"]
            leaf.add(
                f"teacher {teacher['model']} ({teacher['engine']}), {teacher['selection']}: {_short(teacher['hint'])}"
            )


def _add_step(tree: Tree, step: Mapping[str, Any]) -> None:
    made = step["unchanged_reason"] or f"made version {step['weight_version']}"
    branch = tree.add(f"step {step['step']} of {step['lineage']} from version {step['base_version']}: {made}")
    branch.add(
        f"{step['samples']} samples, {step['drops']} drops, closed by {step['closed_by']}, {step['finished_at']}"
    )
    if step["batch"]["uri"]:
        branch.add(f"batch {step['batch']['state']}: {step['batch']['uri']}")


def _add_version(tree: Tree, version: Mapping[str, Any]) -> None:
    branch = tree.add(f"version {version['weight_version']} of {version['policy']}")
    published = version["published"]
    if published is not None:
        removed = ", artefact removed" if version["artefact_removed"] else ""
        branch.add(f"published {published['published_at']} at {published['artefact_uri']}{removed}")
    served = version["served_turns"]
    below = branch.add(f"served {served['count']} turns")
    for turn_id in served["turn_ids"]:
        below.add(turn_id)
    if served["count"] > len(served["turn_ids"]):
        below.add(f"and {served['count'] - len(served['turn_ids'])} more: --limit")


def _spans(turn: Mapping[str, Any]) -> str:
    versions = dict.fromkeys(span["weight_version"] for span in turn["version_spans"])
    return "version " + ", ".join(str(version) for version in versions) if versions else "no known version"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:+g}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _TEXT_CHARACTERS else line[: _TEXT_CHARACTERS - 1] + "…"
