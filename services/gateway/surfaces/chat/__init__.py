"""`POST /v1/chat/completions`: OpenAI's chat completions."""
