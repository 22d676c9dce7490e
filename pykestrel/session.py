"""An engine's one sequence, and whose turn it is to use it.

`Session` is the only code that touches the engine. It remembers which ids the K/V holds, so that a
prompt that starts like the last one is not computed again. `Turn` lets one run at a time have it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, overload

import numpy as np
from numpy.typing import NDArray

from .engine import FillingEngine, PickingEngine
from .errors import KestrelError

if TYPE_CHECKING:
    from .engine import Answer, Engine, Want


_PATIENCE = 1.0  # seconds between two looks at whether a run that is waited for can still end


class Session:
    """An engine's one sequence: its ids, and the guards around every use of it.

    ``seen`` never claims more than the K/V holds: ids are added after a forward pass is complete
    and dropped before the engine forgets them. Whatever an interrupt or an error leaves behind,
    the next prompt starts with a truncation to what both sides agree on.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._picks = engine if isinstance(engine, PickingEngine) else None
        self.seen: list[int] = []
        self._step = threading.Lock()  # held during engine calls only, never across a yield
        self._pid = os.getpid()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def position(self) -> int:
        """How many ids the sequence has."""
        return len(self.seen)

    def check(self) -> None:
        """Raise KestrelError when the session cannot be used: closed, or inherited by a fork."""
        if self._pid != os.getpid():
            raise KestrelError(
                f"this model was loaded by process {self._pid} and cannot be used in its fork "
                f"{os.getpid()}; load it again in this process"
            )
        if self._closed:
            raise KestrelError("this model is closed; load it again to use it")

    @overload
    def prompt(
        self, ids: Sequence[int], *, reuse: bool = True, all_logits: bool = False
    ) -> NDArray[np.float32]: ...

    @overload
    def prompt(self, ids: Sequence[int], *, reuse: bool = True, want: Want | None) -> Answer: ...

    def prompt(
        self,
        ids: Sequence[int],
        *,
        reuse: bool = True,
        all_logits: bool = False,
        want: Want | None = None,
    ) -> Answer:
        """Make the sequence be ``ids`` and return the logits of the last one, float32 [V].

        With ``reuse`` the longest common prefix with what the K/V holds is kept, less one id: the
        last has to run for its logits. With ``all_logits`` the result is [len(ids) - kept, V].
        ``want``: an engine that can may answer with that alone.
        """
        self.check()
        with self._step:
            self.check()
            keep = self.shared_prefix(ids) if reuse else 0
            del self.seen[keep:]
            self.engine.truncate(keep)
            return self._append(ids[keep:], all_logits, want)

    @overload
    def extend(self, ids: Sequence[int], *, all_logits: bool = False) -> NDArray[np.float32]: ...

    @overload
    def extend(self, ids: Sequence[int], *, want: Want | None) -> Answer: ...

    def extend(
        self, ids: Sequence[int], *, all_logits: bool = False, want: Want | None = None
    ) -> Answer:
        """Append ids and return the logits of the last, float32 [V] (of all: [len(ids), V]), or
        what is wanted of them."""
        self.check()
        with self._step:
            self.check()
            if self.engine.position != len(self.seen):  # an interrupt came between the two
                self.engine.truncate(len(self.seen))
            return self._append(ids, all_logits, want)

    def _append(self, ids: Sequence[int], all_logits: bool, want: Want | None) -> Answer:
        answer: Answer
        if want is not None and self._picks is not None:
            answer = self._picks.step(ids, want)
        else:
            answer = self.engine.forward(ids, all_logits=all_logits)
        self.seen.extend(ids)
        return answer

    def last_logits(self) -> NDArray[np.float32]:
        """All logits of the last id, where the engine answered with less."""
        self.check()
        with self._step:
            self.check()
            if self._picks is None:
                raise KestrelError("this engine has given all its logits already")
            return self._picks.last_logits()

    def fill(self, position: int) -> None:
        """Be at ``position``, for measurements: with random K/V where the engine can make it."""
        self.check()
        with self._step:
            self.check()
            if not isinstance(self.engine, FillingEngine):
                raise KestrelError(f"the {self.engine.name} engine cannot make up its K/V")
            self.engine.fill(position)
            self.seen[:] = [*self.seen[:position], *([0] * (position - len(self.seen)))]

    def rewind(self, position: int) -> None:
        """Forget everything at and after ``position``."""
        self.check()
        with self._step:
            self.check()
            del self.seen[position:]
            self.engine.truncate(len(self.seen))

    def shared_prefix(self, ids: Sequence[int]) -> int:
        """How many leading ``ids`` the K/V already holds, at most ``len(ids) - 1``."""
        most = min(len(self.seen), len(ids) - 1)
        return next((i for i in range(most) if self.seen[i] != ids[i]), most)

    def close(self) -> None:
        """Free the engine's memory; waits for a forward pass of another thread, not for its run."""
        if self._closed:
            return
        self._closed = True
        if self._pid == os.getpid():  # a fork's copy of the handle is not its own to free
            with self._step:
                self.engine.close()
        self.seen.clear()


class Turn:
    """One run at a time: other threads wait, the thread that is in it is refused.

    A plain Lock, because a stream may be advanced and closed by other threads than the one that
    began it; ``resume`` keeps the owner up to date for that.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._steps = 0  # how often a run went on, of all runs

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self._owner == threading.get_ident():
            raise KestrelError(
                "this model is busy: a stream that this thread opened is not at its end; finish "
                "it, or close() it, before the next call"
            )
        self._wait()
        try:
            self.resume()
            yield
        finally:
            self._owner = None
            self._lock.release()

    def _wait(self) -> None:
        """Take the lock. A stream that its last thread left behind when it ended, and that nobody
        has gone on with since, is an error rather than a wait without end."""
        steps = -1
        while not self._lock.acquire(timeout=_PATIENCE):
            left = self._owner is not None and not _is_alive(self._owner)
            if left and steps == self._steps:
                raise KestrelError(
                    "this model is busy: a stream was left unfinished by a thread that has ended; "
                    "close() that stream, or let it be dropped, before the next call"
                )
            steps = self._steps if left else -1

    def resume(self) -> None:
        self._owner = threading.get_ident()
        self._steps += 1


def _is_alive(ident: int) -> bool:
    return any(thread.ident == ident for thread in threading.enumerate())
