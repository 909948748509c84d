"""Which tool must be called: what the surfaces' ways of saying it have in common."""

from typing import Any, cast

from services.gateway.surfaces.answer_request import ToolChoice
from services.gateway.surfaces.body_fields import refused


def choice_by_word(choice: object, tools: list[dict[str, Any]]) -> tuple[ToolChoice, str | None] | None:
    """`auto`, `none` or `required`, as OpenAI's APIs say it; None for another form. Raises as `required_tool`."""
    if choice is None or choice == "auto":
        return "auto", None
    if choice == "none":
        return "none", None
    if choice == "required":
        return required_tool(None, tools)
    return None


def required_tool(name: object, tools: list[dict[str, Any]]) -> tuple[ToolChoice, str | None]:
    """A call of any tool, or of the one with this name. Raises RequestRefused when there is none."""
    names = [cast("dict[str, Any]", tool.get("function") or {}).get("name") for tool in tools]
    if not names:
        raise refused("tool_choice asks for a tool call, but tools is empty", "tool_choice")
    if name is None:
        return "required", None
    if not isinstance(name, str) or name not in names:
        raise refused(f"tool_choice names {str(name)[:100]!r}, which is not among the tools", "tool_choice")
    return "required", name
