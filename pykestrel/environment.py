"""Switches in the environment, read in one way."""

from __future__ import annotations

import os
from typing import Final

TRUE: Final = ("1", "true", "yes", "on")
FALSE: Final = ("0", "false", "no", "off")


def switched_on(name: str) -> bool:
    """Whether the variable ``name`` says yes; anything else, and nothing, is no."""
    return os.environ.get(name, "").strip().lower() in TRUE
