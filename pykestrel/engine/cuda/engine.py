"""One sequence on a GPU. What only the policy of an engine knows is here: how long a call is, what
a sampler needs back, and how a run goes on when the library says no."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ... import native
from ...config import ModelConfig
from ...errors import KestrelError, NativeError, NumericsError, UsageError
from ...native import Handle, abi
from ...native.decode import KVRows
from ...rope import rope_table
from .. import Answer, Candidates, Picked, Want
from ..checks import check_ids, check_open, check_truncation
from . import prof
from .plan import SmallWeights, decode_config
from .rows import stored_rows
from .verify import Verifier

if TYPE_CHECKING:
    from ..cpu import CpuEngine
    from ..cpu.kv_cache import StoredRows

F32: TypeAlias = NDArray[np.float32]


class CudaEngine:
    """One sequence on one GPU; see `pykestrel.engine.Engine` for the contract.

    The engine takes ``handle`` over, with all weights of the model in its cache. ``make_cpu`` gives
    the CpuEngine of the same model and K/V kind that goes on when the library answers that it
    cannot (with the same K/V) or that the device is lost (from the ids): it is called then, and
    not before, unless ``verify`` or ``prefill`` "cpu" need it. None: such an answer is an error.
    """

    def __init__(
        self,
        handle: Handle,
        config: ModelConfig,
        small: SmallWeights,
        *,
        quant: str,
        ctx_size: int,
        kv: str = "int8",
        make_cpu: Callable[[], CpuEngine] | None = None,
        prefill: str = "auto",
        verify: bool = False,
    ) -> None:
        self.config = config
        self.ctx_size, self.vocab_size = ctx_size, config.vocab_size
        self.kv = kv
        self.fallback: str | None = None  # why the CPU has taken over
        rope = rope_table(config, ctx_size)
        device = decode_config(config, small, ctx_size, kv, rope, quant)
        native.dev_decode_init(handle, device)
        none = np.empty((0, 0), np.float32)
        # the device has its own copy of the tables
        self.device_config = replace(device, rope_cos=none, rope_sin=none)
        self._handle: Handle | None = handle
        self._step = native.Step(config.vocab_size)
        self._seen: list[int] = []  # what a lost device has to be replaced from
        self._make_cpu = make_cpu
        self._cpu: CpuEngine | None = None
        self._prefill_cpu = prefill == "cpu"
        self._closed = False
        self.verifier: Verifier | None = None
        if verify:
            self.verifier = Verifier(self._take_cpu("verification"), config, quant)
        self._profile = None
        if prof.wanted():
            title = config.model_type
            self._profile = prof.Profile(
                handle, title, lambda: prof.render(native.prof_read(handle), title)
            )

    # ---- Engine

    @property
    def name(self) -> str:
        return "cuda" if self.fallback is None else "cpu"

    @property
    def handle(self) -> Handle | None:
        """The library's handle, for counters and measurements; None when it is given back."""
        return self._handle

    @property
    def position(self) -> int:
        if self.fallback is not None and self._cpu is not None:
            return self._cpu.position
        return len(self._seen)

    def forward(self, ids: Sequence[int], *, all_logits: bool = False) -> F32:
        out = abi.OUT_ALL_LOGITS if all_logits else abi.OUT_LOGITS
        answer = self._append(self._check_ids(ids), out, None)
        assert isinstance(answer, np.ndarray)
        return answer

    def step(self, ids: Sequence[int], want: Want) -> Answer:
        """`forward`, answered by what is wanted of the logits where the device can tell that."""
        out = abi.OUT_TOP if want.top else abi.OUT_GREEDY
        return self._append(self._check_ids(ids), out, want)

    def last_logits(self) -> F32:
        """All logits of the last token of the last `step`."""
        self._check_open()
        last, before = self._seen[-1], self._seen[:-1]
        if self._handle is not None:
            try:
                return native.dev_decode_logits(self._handle, self.vocab_size)
            except NativeError as error:
                self._fall_back(error, before)
        self.truncate(len(before))
        return self.forward([last])

    def truncate(self, position: int) -> None:
        check_truncation(self, position)
        if self._handle is not None:  # also where an interrupt left the device ahead of us
            kept = self._seen[:position]
            try:
                native.kv_seek(self._handle, position)
            except NativeError as error:
                self._fall_back(error, kept)
        del self._seen[position:]
        if self._cpu is not None and self._cpu.position > position:
            self._cpu.truncate(position)

    def close(self) -> None:
        self._give_back()
        if self._cpu is not None:
            self._cpu.close()
        self._cpu = self._make_cpu = self.verifier = None
        self._closed = True
        self._seen = []

    def stats(self) -> dict[str, int | bool]:
        """What the weight cache holds and how it was used; after a fallback the CPU's."""
        self._check_open()
        if self._handle is None:
            return self._cpu.stats() if self._cpu is not None else {}
        info = native.cache_stats(self._handle)
        return {f"cache_{name}": value for name, value in vars(info).items()}

    def warm_up(self) -> None:
        """Build now what the library otherwise builds with the first token: its graphs, and the
        kernels' code on the device. Leaves no trace but in the counters."""
        if self._handle is None or self._profile is not None:  # timed runs have no graphs
            return
        outs = (abi.OUT_GREEDY, abi.OUT_TOP, abi.OUT_LOGITS)
        logits = np.empty(self.vocab_size, np.float32)
        ids = [0] * min(2, self.ctx_size)  # the first of two is one without output
        calls = [(native.dev_decode_run, out) for out in outs]
        for call, out in [*calls, (native.dev_prefill, abi.OUT_GREEDY)]:
            try:
                call(self._handle, self._step, 0, ids, out, logits=logits, top=1, temperature=1.0)
            except NativeError as error:
                if error.status < abi.NOT_DONE:
                    raise
            finally:
                with suppress(NativeError):
                    native.kv_seek(self._handle, 0)
        self._step.nonfinite = False

    def fill(self, position: int, seed: int = 0) -> None:
        """Be at ``position`` with random K/V rows behind it, for measurements at depth: what is
        read is as much as after that many tokens."""
        self._check_open()
        handle = self._handle
        if handle is None:
            raise KestrelError(f"there is no K/V on a device to fill: {self.fallback}")
        if not 0 <= position <= self.ctx_size:
            raise UsageError(f"position {position} is outside a context of {self.ctx_size}")
        start = len(self._seen)
        c, n = self.device_config, min(4096, max(1, position - start))
        rng = np.random.default_rng(seed)
        rows = KVRows.empty(c.kv, n, c.kv_heads, c.head_dim)
        for codes, scales in ((rows.k, rows.k_scales), (rows.v, rows.v_scales)):
            values = rng.standard_normal(codes.shape, np.float32)
            if scales is not None:
                values = np.clip(np.rint(values * 40), -127, 127)
                scales[...] = 1 / 40
            np.copyto(codes, values, casting="unsafe")
        for layer in range(len(c.layers)):
            for lo in range(start, position, n):
                m = min(n, position - lo)
                native.kv_write(handle, c, layer, lo, rows.first(m))
        native.kv_seek(handle, position)
        if self.verifier is not None:
            self.verifier.cpu.truncate(0)
            self.verifier.cpu.take_over(position, 0, self._read_rows(handle, position))
        self._seen[:] = [*self._seen[:position], *([0] * (position - start))]

    # ---- one call

    def _append(self, ids: list[int], out: int, want: Want | None) -> Answer:
        handle = self._handle
        if handle is None:
            assert self._cpu is not None
            logits = self._cpu.forward(ids, all_logits=out == abi.OUT_ALL_LOGITS)
            self._seen.extend(ids)
            return logits
        start = len(self._seen)
        self._step.nonfinite = False
        try:
            if self.verifier is not None:
                answer: Answer = self._run_verified(handle, self.verifier, ids, out)
            elif self._prefill_cpu and len(ids) > 1:
                answer = self._run_on_cpu(handle, ids, out)
            else:
                answer = self._run(handle, ids, out, want)
        except NativeError as error:
            self._forget(start)
            if self._step.nonfinite and error.status == abi.NOT_DONE:
                raise NumericsError(
                    f"a NaN or an infinity came out of the forward pass on the GPU at position "
                    f"{start + len(ids) - 1} or before; check the model's files, or find the layer "
                    "with --verify"
                ) from None
            self._fall_back(error, self._seen)
            return self._append(ids, out, want)
        except BaseException:  # an interrupt between two chunks: as it was before the call
            self._forget(start)
            raise
        return answer

    def _run(self, handle: Handle, ids: list[int], out: int, want: Want | None) -> Answer:
        step, position, count = self._step, len(self._seen), len(ids)
        every = out == abi.OUT_ALL_LOGITS
        logits: F32 | None = None
        if every:
            logits = np.empty((count, self.vocab_size), np.float32)
        elif out == abi.OUT_LOGITS:
            logits = np.empty(self.vocab_size, np.float32)
        # one chunk a call: between two of them Ctrl+C is heard
        chunk = self.device_config.prefill_rows
        for lo in range(0, count, chunk):
            part = ids[lo : lo + chunk]
            last = lo + len(part) == count
            part_logits = logits
            if every and logits is not None:
                part_logits = logits[lo : lo + len(part)]
            run = native.dev_decode_run if len(part) == 1 else native.dev_prefill
            run(
                handle,
                step,
                position + lo,
                part,
                out if every or last else abi.OUT_NONE,
                logits=part_logits,
                vocab_limit=want.vocab_limit if want else 0,
                top=want.top if want else 0,
                temperature=want.temperature if want else 1.0,
            )
            self._seen.extend(part)
        if logits is not None:
            return logits
        if out == abi.OUT_GREEDY:
            return Picked(step.id)
        if not step.top_count:  # too many tie
            return native.dev_decode_logits(handle, self.vocab_size)
        n = step.top_count
        return Candidates(step.top_ids[:n].copy(), step.top_logits[:n].copy(), step.sum_exp)

    def _run_verified(self, handle: Handle, verifier: Verifier, ids: list[int], out: int) -> F32:
        """Token by token with a trace, and each on the CPU beside it."""
        every = out == abi.OUT_ALL_LOGITS
        rows = np.empty((len(ids) if every else 1, self.vocab_size), np.float32)
        trace = np.empty((1, verifier.trace_size), np.float32)
        for i, token in enumerate(ids):
            row = rows[i if every else 0]
            position = len(self._seen)
            try:
                native.dev_decode_run(
                    handle, self._step, position, [token], abi.OUT_LOGITS, logits=row, trace=trace
                )
            except NativeError:
                if self._step.nonfinite:  # without logits it runs, and shows where they broke
                    native.dev_decode_run(
                        handle, self._step, position, [token], abi.OUT_NONE, trace=trace
                    )
                    verifier.compare(token, trace[0], None, self._read_row(handle, position))
                    self._step.nonfinite = True
                raise
            self._seen.append(token)
            verifier.compare(token, trace[0], row, self._read_row(handle, position))
        return rows if every else rows[0]

    def _run_on_cpu(self, handle: Handle, ids: list[int], out: int) -> F32:
        """--prefill cpu: the CPU computes, the device gets the rows."""
        start = len(self._seen)
        end = start + len(ids)
        cpu = self._take_cpu("prefill on the CPU")
        cpu.truncate(0)
        cpu.take_over(start, 0, self._read_rows(handle, start))
        logits = cpu.forward(ids, all_logits=out == abi.OUT_ALL_LOGITS)
        for layer, (k, v, k_scales, v_scales) in enumerate(cpu.copy_rows(start, end)):
            scales = (k_scales, v_scales) if self.kv == "int8" else (None, None)
            native.kv_write(handle, self.device_config, layer, start, KVRows(k, v, *scales))
        native.kv_seek(handle, end)
        self._seen.extend(ids)
        return logits

    def _forget(self, position: int) -> None:
        """Be at ``position`` again after a call that did not come to its end."""
        self._seen[position:] = []
        if self._cpu is not None and self._cpu.position > position:
            self._cpu.truncate(position)
        if self._handle is not None:
            with suppress(NativeError):  # the next call meets what is wrong, and answers it
                native.kv_seek(self._handle, position)

    # ---- the way back

    def _fall_back(self, error: NativeError, ids: list[int]) -> None:
        """Go on with ``ids`` on the CPU, for good. Raises the error when there is no CPU engine."""
        handle = self._handle
        if handle is None or self._make_cpu is None:
            raise error
        rows: list[StoredRows] | None = None
        if error.status >= abi.NOT_DONE:
            with contextlib.suppress(NativeError):  # then the device is lost as well
                rows = list(self._read_rows(handle, len(ids)))
        # Said before the work: the CPU's weights may have to be read from the files, all of them.
        how = "computing the text so far again" if rows is None else "going on from the same K/V"
        warnings.warn(f"running on the CPU from here on ({how}): {error}", stacklevel=4)
        try:
            cpu = self._take_cpu("going on without the GPU")
        except KestrelError as other:  # no memory for the weights, or their files are gone
            raise KestrelError(f"{error}, and the CPU cannot go on: {other}") from None
        cpu.truncate(0)
        if rows is not None:
            cpu.take_over(len(ids), 0, rows)
        elif ids:
            cpu.forward(ids)
        self._seen = list(ids)
        self.fallback = f"the GPU was given up: {error}"
        self.verifier = None
        self._give_back()

    def _take_cpu(self, what: str) -> CpuEngine:
        """The CPU engine, made when it is needed first."""
        if self._cpu is None:
            if self._make_cpu is None:
                raise KestrelError(f"{what} needs the model on the CPU, which has no weights there")
            self._cpu = self._make_cpu()
        return self._cpu

    def _read_rows(self, handle: Handle, position: int) -> Iterator[StoredRows]:
        """K and V below ``position``, layer by layer, as the CPU's K/V holds them."""
        return stored_rows(handle, self.device_config, 0, position)

    def _read_row(self, handle: Handle, position: int) -> Iterator[StoredRows]:
        return stored_rows(handle, self.device_config, position, position + 1)

    def _give_back(self) -> None:
        """Free the device."""
        if self._profile is not None:
            self._profile.finish()
            self._profile = None
        handle, self._handle = self._handle, None
        if handle is not None:
            try:
                native.destroy(handle)
            except NativeError as error:  # of a lost device: the process holds nothing any more
                warnings.warn(f"the GPU's memory was not given back: {error}", stacklevel=2)

    # ---- checks

    def _check_open(self) -> None:
        check_open(self._closed)

    def _check_ids(self, ids: Sequence[int]) -> list[int]:
        self._check_open()
        if len(ids) == 1 and 0 <= ids[0] < self.vocab_size and self.position < self.ctx_size:
            return [int(ids[0])]  # decoding: what NumPy would cost is a few percent of a token
        return [int(token) for token in check_ids(self, ids)]
