"""The command line. ``main`` returns the exit code; heavy imports wait for the chosen command."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``pykestrel``; ``argv`` is sys.argv[1:] when None."""
    from .main import main as run

    return run(argv)
