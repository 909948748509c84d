"""Keeps API keys out of everything that is written or answered, wherever a client put them. Pure.

Keys belong into one header, but clients put them into queries, paths, model names and session ids. Message contents are
not touched: they are what the policy reads, and are recorded as they are.
"""

import hashlib
import re
from collections.abc import Mapping

from clawstream.errors import RequestRefused

CREDENTIAL_HEADERS = ("authorization", "x-api-key", "api-key", "proxy-authorization", "cookie")
_CREDENTIAL_QUERIES = ("key", "api_key", "api-key", "apikey", "access_token", "token")
_KEY_BEGINNING = "sk-"
_KEY_PATTERN = re.compile(rf"\b{_KEY_BEGINNING}[A-Za-z0-9_-]{{12,}}")
"""The form that most providers' keys have."""
_SHORTEST_SECRET = 8
"""Shorter ones are placeholders such as `unused`, which also occur in honest text."""


def presented_secrets(headers: Mapping[str, str], query: Mapping[str, str]) -> tuple[str, ...]:
    """Everything that the client may have meant as a credential, longest first."""
    found: set[str] = set()
    for name in CREDENTIAL_HEADERS:
        value = headers.get(name, "")
        found |= {value, value.partition(" ")[2].strip()}
    if query:
        found |= {query.get(name, "") for name in _CREDENTIAL_QUERIES}
    return tuple(sorted((value for value in found if len(value) >= _SHORTEST_SECRET), key=len, reverse=True))


def redact(text: str, secrets: tuple[str, ...]) -> str:
    """`text` with every secret, and everything that looks like one, replaced by a short hash of it."""
    for secret in secrets:
        text = text.replace(secret, _tag(secret))
    return _KEY_PATTERN.sub(lambda match: _tag(match[0]), text) if _KEY_BEGINNING in text else text


def redacted_headers(headers: Mapping[str, str], secrets: tuple[str, ...]) -> dict[str, str]:
    """The headers without credentials, and with secrets in the others replaced. Names are in lower case."""
    return {name: redact(value, secrets) for name, value in headers.items() if name not in CREDENTIAL_HEADERS}


def redacted_refusal(refusal: RequestRefused, secrets: tuple[str, ...]) -> RequestRefused:
    """The same refusal, fit to be told and written down."""
    message = redact(str(refusal), secrets)
    if message == str(refusal):
        return refusal
    return RequestRefused(
        message,
        status=refusal.status,
        error_type=refusal.error_type,
        code=refusal.code,
        parameter=refusal.parameter,
        retry_after_seconds=refusal.retry_after_seconds,
    )


def _tag(secret: str) -> str:
    return "key-" + hashlib.sha256(secret.encode("utf-8", errors="surrogatepass")).hexdigest()[:12]
