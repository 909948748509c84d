"""What all unit tests have in common."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def no_certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("no-certificates")


@pytest.fixture(scope="module", autouse=True)
def nobody_is_trusted(no_certificates: Path) -> Iterator[None]:
    """Unit tests reach no network, so their HTTP clients need no certificates: reading all of them anew for each of
    hundreds of clients was a third of the gateway's tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", str(no_certificates))
        yield
