"""How many threads BLAS uses.

threadpoolctl changes the number in a running process. Without it only the environment can say it,
and BLAS reads that once, when NumPy is imported: `before_numpy` is for programs that know early.
"""

from __future__ import annotations

import os
import sys
from typing import Any, ClassVar

from .errors import KestrelError

VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")

_from_start: int | None = None  # what `before_numpy` gave BLAS


def before_numpy(count: int) -> bool:
    """Have BLAS begin with ``count`` threads; False when NumPy is imported already."""
    global _from_start
    if "numpy" in sys.modules:
        return False
    for name in VARIABLES:
        os.environ[name] = str(count)
    _from_start = count
    return True


class BlasLimit:
    """BLAS runs with ``count`` threads until `release`.

    BLAS belongs to the process: of several limits the newest holds, and when the last is released
    the number is what it was before the first. Raises KestrelError where it cannot be changed.
    """

    _active: ClassVar[list[BlasLimit]] = []
    _before: ClassVar[Any] = None  # threadpoolctl's memory of the number before the first change

    def __init__(self, count: int) -> None:
        self.count = count
        if _from_start == count and not BlasLimit._active:
            self._held = False  # it began that way
            return
        try:
            import threadpoolctl  # noqa: F401
        except ImportError:
            raise KestrelError(
                f"threads={count} cannot be set in a running process without threadpoolctl; "
                'install it with `pip install "pykestrel[cpu]"`, or set OPENBLAS_NUM_THREADS '
                "before Python starts"
            ) from None
        if not BlasLimit._active:
            BlasLimit._before = _limits(None)
        self._held = True
        BlasLimit._active.append(self)
        _limits(count)

    def release(self) -> None:
        """Idempotent."""
        if not self._held:
            return
        self._held = False
        BlasLimit._active.remove(self)
        if BlasLimit._active:
            _limits(BlasLimit._active[-1].count)
        else:
            BlasLimit._before.restore_original_limits()


def _limits(count: int | None) -> Any:
    """Change the number now; the result remembers what it was. None changes nothing."""
    import threadpoolctl

    change: Any = threadpoolctl.threadpool_limits
    return change(count, user_api="blas")
