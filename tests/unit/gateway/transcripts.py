"""Requests in the shapes that real agents send: made up by us, after recordings of their structure."""

from typing import Any

_CALL = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"path": "x"}'}}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "read", "description": "Reads.", "parameters": {"type": "object", "properties": {}}},
}

OPENCLAW: dict[str, Any] = {
    "model": "policy",
    "stream": True,
    "stream_options": {"include_usage": True},
    "tool_choice": "auto",
    "max_completion_tokens": 40,
    "tools": [_TOOL],
    "messages": [
        {"role": "system", "content": "You are a personal assistant. Runtime: agent=main | session=a"},
        {"role": "user", "content": "[Sun 2026-11-29 15:01 UTC] read x"},
        {"role": "assistant", "content": None, "tool_calls": [{**_CALL, "id": "call1"}]},
        {"role": "tool", "tool_call_id": "call1", "content": "text of x"},
        {
            "role": "user",
            "content": [
                {
                    "type": "text",
                    "text": "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nnow\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>",
                }
            ],
        },
    ],
}
MINI_SWE_AGENT: dict[str, Any] = {
    "model": "policy",
    "temperature": 0.0,
    "messages": [
        {"role": "system", "content": "Solve it."},
        {"role": "user", "content": "Fix the bug."},
        {"role": "assistant", "reasoning_content": "hm", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "<returncode>1</returncode>"},
        {"role": "user", "content": "No tool call found."},
    ],
    "tools": [_TOOL],
}
OPENCODE: dict[str, Any] = {
    "model": "policy",
    "stream": True,
    "messages": [
        {"role": "system", "content": "Today is Sunday."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "<system-reminder>"}]},
        {"role": "assistant", "content": "", "tool_calls": [_CALL], "reasoning_content": "I read."},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": "partial ans"},
    ],
    "tools": [_TOOL],
}
QWEN_CODE: dict[str, Any] = {
    "model": "policy",
    "stream": True,
    "top_p": 0.9,
    "messages": [
        {"role": "developer", "content": "You are an agent."},
        {"role": "user", "content": "This is the directory listing ..."},
        {"role": "assistant", "content": "Got it. Thanks for the context!"},
        {"role": "user", "content": "hello 😀"},
    ],
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
    "stop": ["###", "END"],
}
AIDER: dict[str, Any] = {
    "model": "policy",
    "temperature": 0,
    "stream": True,
    "logprobs": True,
    "messages": [
        {"role": "system", "content": "Act as an expert developer."},
        {"role": "user", "content": "I have *added these files*:\n\nx.py\n```\npass\n```"},
        {"role": "assistant", "content": "Ok, any changes I propose will be to those files."},
        {"role": "user", "content": "rename x\n\nOnly use SEARCH/REPLACE blocks!"},
    ],
}
CODEX: dict[str, Any] = {
    "model": "policy",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list files"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "abc"},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "shell", "arguments": '{"command":["ls"]}'},
        {"type": "function_call_output", "call_id": "c1", "output": '{"output":"x"}'},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "One file.", "annotations": []}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "thanks"}]},
    ],
    "tools": [
        {"type": "function", "name": "shell", "strict": False, "parameters": {"type": "object", "properties": {}}},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "web_search"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "thread-1",
    "text": {"verbosity": "low", "format": {"type": "text"}},
}
CLAUDE_CODE: dict[str, Any] = {
    "model": "policy",
    "max_tokens": 40,
    "stream": True,
    "system": [{"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder>"}, {"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I read."},
                {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "x"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "x", "is_error": False},
                {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ],
    "tools": [
        {"name": "Read", "description": "Reads.", "input_schema": {"type": "object", "properties": {}}},
        {"type": "web_search_20250305", "name": "web_search"},
    ],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "metadata": {"user_id": "user_a_account__session_0f8fad5b-d9cb-469f-a165-70867728950e"},
    "stop_sequences": ["###"],
}

TRANSCRIPTS: tuple[tuple[str, dict[str, Any]], ...] = (
    *(("/v1/chat/completions", body) for body in (OPENCLAW, MINI_SWE_AGENT, OPENCODE, QWEN_CODE, AIDER)),
    ("/v1/responses", CODEX),
    ("/v1/messages", CLAUDE_CODE),
    ("/v1/messages/count_tokens", CLAUDE_CODE),
)
