"""`POST /v1/responses`: OpenAI's responses, without state on the server."""
