"""A model of a few thousand weights, driven through pykestrel.native alone, and made to fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from fake_cuda import FakeCuda, Kind
from numpy.typing import NDArray

from pykestrel import native, quant
from pykestrel.native import abi
from pykestrel.native.weights import Proj


@dataclass
class DeviceModel:
    """Shapes, weights and a handle. Layer 1 has experts when there are any."""

    handle: native.Handle
    config: native.DecodeConfig
    matrices: dict[int, native.Matrix]  # by key
    values: dict[int, NDArray[np.float32]]

    def upload(self, key: int) -> None:
        """Put one weight into the cache, pinned."""
        matrix = self.matrices[key]
        codes, scales = _canonical(self.values[key].tobytes(), matrix)
        native.cache_begin(self.handle, key, matrix)
        native.cache_rows(self.handle, key, matrix, 0, codes, scales)
        native.cache_end(self.handle, key)

    def upload_all(self) -> None:
        for key in self.matrices:
            self.upload(key)

    def run(
        self, ids: list[int], out: int = abi.OUT_LOGITS, *, prefill: bool = False
    ) -> NDArray[np.float32]:
        """Append tokens where the model is; logits of the last one (or of all)."""
        vocab = self.config.vocab
        shape = (len(ids), vocab) if out == abi.OUT_ALL_LOGITS else (vocab,)
        logits = np.zeros(shape, np.float32)
        step = native.Step(vocab)
        position = native.kv_position(self.handle)
        call = native.dev_prefill if prefill else native.dev_decode_run
        call(self.handle, step, position, ids, out, logits=logits, top=4)
        if out == abi.OUT_GREEDY:
            return np.array([step.id], np.float32)
        if out == abi.OUT_TOP:
            return np.concatenate([step.top_ids[:4], step.top_logits[:4]]).astype(np.float32)
        return logits

    def kv_bytes(self, positions: int) -> bytes:
        """Every K/V row of the positions below."""
        kept = b""
        for layer in range(len(self.config.layers)):
            rows = native.kv_read(self.handle, self.config, layer, 0, positions)
            for part in (rows.k, rows.v, rows.k_scales, rows.v_scales):
                kept += b"" if part is None else part.tobytes()
        return kept


@cache
def _canonical(values: bytes, matrix: native.Matrix) -> tuple[Any, Any]:
    """Codes and scales of float32 rows; every model of a test has the same."""
    rows = np.frombuffer(values, np.float32).reshape(matrix.rows, matrix.k)
    if matrix.kind == "f32":
        return rows, None
    if matrix.kind == "bf16":
        return quant.f32_to_bf16(rows), None
    quantised = quant.quantize(rows, matrix.kind)
    return quantised.codes, quantised.scales


def make(
    kind: str = "q8",
    *,
    experts: int = 0,
    kv: str = "int8",
    graph: bool = True,
    ctx_size: int = 24,
    hidden: int = 64,
    prefill_rows: int = 0,
) -> DeviceModel:
    """A handle on device 0 with the model's config; nothing is uploaded or set up yet."""
    random = np.random.default_rng(5)
    heads, kv_heads, head_dim, f, vocab, moe_f = 4, 2, 16, 96, 200, 32

    def ones(n: int) -> NDArray[np.float32]:
        return (1 + 0.1 * random.standard_normal(n)).astype(np.float32)

    layers = [
        native.Layer(
            ones(hidden),
            ones(hidden),
            moe=experts > 0 and i == 1,
            window=8 if i == 0 else 0,
            q_norm=ones(head_dim),
            k_norm=ones(head_dim),
            qkv_bias=ones((heads + 2 * kv_heads) * head_dim) - 1 if i == 0 else None,
        )
        for i in range(2)
    ]
    angles = np.outer(np.arange(ctx_size), 100.0 ** (-np.arange(head_dim // 2) / (head_dim // 2)))
    config = native.DecodeConfig(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=f,
        vocab=vocab,
        ctx_size=ctx_size,
        rms_norm_eps=1e-6,
        final_norm=ones(hidden),
        rope_cos=np.cos(angles).astype(np.float32),
        rope_sin=np.sin(angles).astype(np.float32),
        layers=layers,
        experts=experts,
        experts_per_token=2 if experts else 0,
        moe_intermediate=moe_f if experts else 0,
        norm_topk_prob=True,
        kv=kv,
        graph=graph,
        prefill_rows=prefill_rows,
    )
    shapes: dict[tuple[int, int], native.Matrix] = {}
    for i, layer in enumerate(layers):
        rows = (heads + 2 * kv_heads) * head_dim
        shapes[i, Proj.FUSED_QKV] = native.Matrix(kind, 1, rows, hidden)
        shapes[i, Proj.O] = native.Matrix(kind, 1, hidden, heads * head_dim)
        if layer.moe:
            shapes[i, Proj.ROUTER] = native.Matrix("f32", 1, experts, hidden)
            shapes[i, Proj.GATE] = native.Matrix(kind, experts, moe_f, hidden)
            shapes[i, Proj.UP] = native.Matrix(kind, experts, moe_f, hidden)
            shapes[i, Proj.DOWN] = native.Matrix(kind, experts, hidden, moe_f)
        else:
            shapes[i, Proj.FUSED_GU] = native.Matrix(kind, 2, f, hidden)
            shapes[i, Proj.DOWN] = native.Matrix(kind, 1, hidden, f)
    shapes[native.HEAD_LAYER, Proj.EMBED] = native.Matrix(kind, 1, vocab, hidden)
    shapes[native.HEAD_LAYER, Proj.HEAD] = native.Matrix(kind, 1, vocab, hidden)
    matrices = {native.wkey(*place): matrix for place, matrix in shapes.items()}
    values = {
        key: (random.standard_normal((m.rows, m.k)) / np.sqrt(m.k)).astype(np.float32)
        for key, m in matrices.items()
    }
    return DeviceModel(native.create(0), config, matrices, values)


def ready(kind: str = "q8", **options: Any) -> DeviceModel:
    """A model whose weights are there and whose decoding is set up."""
    model = make(kind, **options)
    model.upload_all()
    native.dev_decode_init(model.handle, model.config)
    return model


def status_of(call: Callable[[], object]) -> int:
    try:
        call()
    except native.NativeError as e:
        return e.status
    return abi.OK


def each_failing_call(
    fake: FakeCuda,
    act: Callable[[], object],
    undo: Callable[[], object],
    state: Callable[[], object],
    error: int,
    kind: Kind = Kind.ANY,
) -> int:
    """Let the first, second, ... runtime call of ``act`` fail, until all of them have.

    After -1 ``state`` must be what it was and ``act`` must work at once. A failure that the library
    can do without (an attribute, giving something back) may go unnoticed. Returns how many calls
    there were.
    """
    for n in range(1, 1000):
        before, live, used = state(), fake.live, fake.memory_used
        fake.fail_at(n, error, kind)
        status = status_of(act)
        struck = not fake.fault_pending
        fake.fail_at(0, kind=kind)
        if status != abi.OK:
            assert struck
            assert status == abi.NOT_DONE, f"call {n}: {native.last_error()}"
            assert state() == before, f"call {n} changed something: {native.last_error()}"
            assert (fake.live, fake.memory_used) == (live, used), f"call {n} left something"
            assert status_of(act) == abi.OK, f"after call {n}: {native.last_error()}"
        undo()
        if not struck:
            return n - 1
    raise AssertionError("it never succeeds")


def counters(model: DeviceModel) -> tuple[int, ...]:
    prof = native.prof_read(model.handle)
    return (prof.tokens, prof.launches, prof.h2d_copies, prof.d2h_bytes, prof.upload_bytes)


def counters_of_runs(model: DeviceModel) -> tuple[int, ...]:
    """Those that reading the K/V does not change."""
    prof = native.prof_read(model.handle)
    return (prof.tokens, prof.launches, prof.h2d_copies)
