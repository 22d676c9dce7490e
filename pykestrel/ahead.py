"""What is needed later, begun now."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """A function that runs on a thread of its own from now on.

    It is for work that holds Python's lock beside work that does not (the driver, uploads, BLAS).
    A process does not end before the function has.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name=f"ahead: {function!r:.60}")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._made = self._function()
        except BaseException as error:  # raised where the result is wanted
            self._error = error

    def result(self) -> T:
        """Wait for what the function returns, or raise what it raised; once."""
        self._thread.join()
        # An error that is kept here would keep the frames that it passed, and all their objects.
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return self._made
        finally:
            del error
