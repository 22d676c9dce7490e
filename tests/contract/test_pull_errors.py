"""What `pull org/name` says when the hub's client fails."""

from __future__ import annotations

import pytest

from pykestrel.errors import ModelError
from pykestrel.pull import _hub_error, check_name


class ConnectError(Exception):
    """As the HTTP client calls it."""


class LocalEntryNotFoundError(FileNotFoundError):
    """As huggingface_hub calls it."""


class OfflineModeIsEnabled(ConnectionError):
    """As huggingface_hub calls it."""


class RepositoryNotFoundError(Exception):
    """As huggingface_hub calls it."""


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            LocalEntryNotFoundError("An error happened. Got: ConnectError: [Errno -2] Name or"),
            "the hub cannot be reached",
        ),
        (chained(RuntimeError("x"), ConnectError("[Errno -2]")), "the hub cannot be reached"),
        (
            chained(LocalEntryNotFoundError("x"), OfflineModeIsEnabled("y")),
            "HF_HUB_OFFLINE is set",
        ),
        (RepositoryNotFoundError("404 Client Error. (Request ID: 1)"), "no such repository"),
        (OSError(28, "No space left on device"), "no space left on device; check"),
        (ValueError("odd.\nmore"), "odd; check the name"),
    ],
)
def test_one_sentence_without_the_clients_own_words(error: Exception, words: str) -> None:
    told = str(_hub_error("org/name", error))
    assert told.startswith("org/name could not be fetched from the hub: ")
    assert words in told
    assert "Errno" not in told
    assert "Got:" not in told
    assert "\n" not in told


def test_names_that_cannot_be_fetched() -> None:
    for name in ("smollm2-135m", "SmolLM2-135M", "org/name", "org/name@main"):
        check_name(name)
    for name in ("smol", "a/b/c", "", "../x"):
        with pytest.raises(ModelError, match="no model that can be fetched"):
            check_name(name)
