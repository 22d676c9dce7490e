"""The forward pass in NumPy: what a model computes, and the way back when there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...errors import NumericsError, OutOfMemory, UsageError
from ...quant import QTensor, bf16_to_f32, dequantize
from ...rope import rope_table
from ...weights import LayerWeights, Matrix, ModelWeights
from ..checks import check_ids, check_open, check_truncation
from .attention import attend_many, attend_one
from .buffers import Buffers
from .cache import WeightCache
from .kv_cache import KV_KINDS, KVCache, StoredRows, kv_bytes
from .linear import LAYING_OUT, Linear, Place, lay_out_all, multiply, multiply_codes
from .memory import all_expanded, available_memory, gigabytes, memory_needed
from .moe import MoeLayer, mix_experts
from .norm import head_norm, rms_norm, rotate, silu_times
from .offload import Job, Offload
from .store import Store
from .workers import INLINE, Scratch, Workers

F32: TypeAlias = NDArray[np.float32]
# Called with (layer, quantity, its values) for each quantity of vcuda.h's trace, in its order, when
# one token at a time runs; the array is valid during the call only.
Trace: TypeAlias = Callable[[int, str, F32], None]
# Called with (layer, the row as it is stored) when a token's K/V row was made and before anything
# reads it; the row that it returns is the one that is kept.
OnRow: TypeAlias = Callable[[int, StoredRows], StoredRows]

# Rows of a prefill batch. A dense matrix is read once a batch, and 512 rows hide that. Of a batch
# an expert gets only the fraction k / E, so a larger one halves the share of expanding them.
_BATCH = 512
_BATCH_MOE = 1024


@dataclass(eq=False)
class _Layer:
    input_norm: F32  # [H]
    qkv: Linear  # [q_dim + 2 kv_dim, H]
    o: Linear  # [H, q_dim]
    post_norm: F32  # [H]
    gate_up: Linear | None  # [2F, H], dense
    down: Linear | None  # [H, F], dense
    moe: MoeLayer | None
    head_norms: F32 | None  # [heads + kv_heads, head_dim]: q_norm for each q head, k_norm for k
    window: int | None


class CpuEngine:
    """One sequence on the CPU; see `pykestrel.engine.Engine` for the contract.

    The engine takes ``weights`` over: it lays every matrix out anew, or copies it, and lets go of
    the original, so that no weight is held twice; ``weights`` is empty afterwards.

    ``kv``: "int8", "f16" or "f32". ``cpu_cache``: bytes for matrices that are kept as float32;
    None: all of them when half of the free memory and what ``store`` leaves hold them, else none.
    ``threads``: of the work outside BLAS, whose own threads are the caller's affair; None: one a
    core. ``elsewhere``: matrices that a device will compute as a rule: they get no float32 copies,
    and are laid out when they are needed here. ``store``: where the matrices lie; None: in memory.
    Raises OutOfMemory when the K/V of ``ctx_size`` positions cannot fit.
    """

    name = "cpu"

    def __init__(
        self,
        weights: ModelWeights,
        *,
        ctx_size: int,
        kv: str = "int8",
        cpu_cache: int | None = None,
        threads: int | None = None,
        elsewhere: Container[Place] = (),
        store: Store | None = None,
    ) -> None:
        if kv not in KV_KINDS:
            raise UsageError(f"kv is {kv!r}, but must be one of {', '.join(KV_KINDS)}")
        if ctx_size < 1:
            raise UsageError(f"ctx_size is {ctx_size}, but must be at least 1")
        if cpu_cache is not None and cpu_cache < 0:
            raise UsageError(f"cpu_cache is {cpu_cache} bytes, but cannot be negative")
        config = self.config = weights.config
        self.ctx_size, self.vocab_size = ctx_size, config.vocab_size
        need, free = kv_bytes(config, ctx_size, kv), available_memory()
        if need > free:
            fits = max(1, free // kv_bytes(config, 1, kv))
            raise OutOfMemory(
                f"K/V of {ctx_size} positions as {kv} needs {gigabytes(need)}, free "
                f"{gigabytes(free)}; try --ctx-size {fits}"
                + ("" if kv == "int8" else " or --kv int8")
            )
        self._workers = Workers(threads)
        self._kv = KVCache(config, ctx_size, kv)
        self._position = 0
        self._closed = False
        self._store = store or Store()
        self._elsewhere = elsewhere
        self._cos = self._sin = np.empty((0, 1, 1, config.head_dim // 2), np.float32)
        self._take(weights)
        self._cpu_cache, self._kv_need = cpu_cache, need
        self.leave(elsewhere)
        self._one = Buffers(config, Scratch(), 1)
        self._batch_scratch = Scratch()
        self._batch: Buffers | None = None
        self.trace: Trace | None = None
        self.on_row: OnRow | None = None
        self.offload: Offload | None = None

    # ---- construction

    def leave(self, elsewhere: Container[Place]) -> None:
        """Choose the matrices that `warm_up` makes float32 copies of, among all but those that a
        device will compute as a rule."""
        dense, routed = (
            [linear for linear in linears if linear.place not in elsewhere]
            for linears in self._linears()
        )
        budget = self._cpu_cache
        if budget is None:
            expanded = sum(linear.expanded_bytes for linear in dense)
            free = available_memory() - self._kv_need
            budget = expanded if all_expanded(expanded, free, self._store.left) else 0
        self._cache = WeightCache(budget, self._workers)
        active = self.config.num_experts_per_tok / max(1, self.config.num_experts)
        self._cache.plan(dense, routed, active)

    @property
    def expands(self) -> bool:
        """Whether a single token goes through BLAS, from float32 copies, or from the codes."""
        return self._cache.decode_blas

    def _take(self, weights: ModelWeights) -> None:
        # None: rows are read from the head
        self._embed = None if weights.head is None else self._store.hold(weights.embed)
        self._final_norm = weights.final_norm
        head = weights.embed if weights.head is None else weights.head
        weights.head = None
        del weights.embed
        self._head = self._linear(Place("head"), [head], None)
        del head
        self._layers: list[_Layer] = []
        for i in range(weights.config.num_hidden_layers):
            self._layers.append(self._take_layer(weights.layers.pop(0), i))

    def _take_layer(self, layer: LayerWeights, i: int) -> _Layer:
        """Lay out one layer: q, k and v as one matrix, gate and up as another, experts one by
        one."""
        config = self.config
        gate_up = down = moe = None
        if layer.router is None:
            bias = _join(layer.gate_bias, layer.up_bias)
            gate_up = self._linear(Place("gate_up", i), [layer.gate, layer.up], bias)
            down = self._linear(Place("down", i), [layer.down], layer.down_bias)
        else:
            experts = self._take_experts(layer, i)
            moe = MoeLayer(
                router=np.ascontiguousarray(layer.router.T),
                gate_up=[gate_up for gate_up, _ in experts],
                down=[down for _, down in experts],
                experts_per_token=config.num_experts_per_tok,
                norm_topk_prob=config.norm_topk_prob,
            )
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        head_norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            head_norms = np.empty((heads + kv_heads, config.head_dim), np.float32)
            head_norms[:heads] = layer.q_norm
            head_norms[heads:] = layer.k_norm
        qkv_bias = _join(layer.q_bias, layer.k_bias, layer.v_bias)
        return _Layer(
            input_norm=layer.input_norm,
            qkv=self._linear(Place("qkv", i), [layer.q, layer.k, layer.v], qkv_bias),
            o=self._linear(Place("o", i), [layer.o], layer.o_bias),
            post_norm=layer.post_norm,
            gate_up=gate_up,
            down=down,
            moe=moe,
            head_norms=head_norms,
            window=config.layer_window[i],
        )

    def _take_experts(self, layer: LayerWeights, i: int) -> list[tuple[Linear, Linear]]:
        """Gate and up, and down, of every expert: each by one thread, as it is little work. Under
        a budget one after another, so that always the same ones lie in memory."""
        made: dict[int, tuple[Linear, Linear]] = {}

        def take(e: int, _: Scratch) -> None:
            both = [layer.gate[e], layer.up[e]]
            gate_up = self._linear(Place("expert_gate_up", i, e), both, None, INLINE)
            down = self._linear(Place("expert_down", i, e), [layer.down[e]], None, INLINE)
            made[e] = gate_up, down

        numbers = range(self.config.num_experts)
        threads = LAYING_OUT if self._store.budget is None else 1
        self._workers.run(take, numbers, threads)
        return [made[e] for e in numbers]

    def _linear(
        self, place: Place, parts: list[Matrix], bias: F32 | None, workers: Workers | None = None
    ) -> Linear:
        """Under a budget what a device computes goes to the file at once; else it is laid out when
        that is needed. A tied head gives the embedding's rows, wherever it is multiplied."""
        elsewhere, embeds = place in self._elsewhere, place.kind == "head" and self._embed is None
        return Linear(
            parts,
            bias,
            workers or self._workers,
            place,
            self._store,
            seldom=elsewhere and not embeds,
            later=elsewhere and self._store.budget is None,
        )

    def _linears(self) -> tuple[list[Linear], list[Linear]]:
        """Dense matrices in the order a token reads them, and the routed ones."""
        dense: list[Linear] = []
        routed: list[Linear] = []
        for layer in self._layers:
            dense += [layer.qkv, layer.o]
            dense += [linear for linear in (layer.gate_up, layer.down) if linear is not None]
            if layer.moe is not None:
                routed += layer.moe.gate_up + layer.moe.down
        return [*dense, self._head], routed

    # ---- Engine

    @property
    def position(self) -> int:
        return self._position

    def forward(self, ids: Sequence[int], *, all_logits: bool = False) -> F32:
        self._check_open()
        tokens = check_ids(self, ids)
        count, start = len(tokens), self._position
        try:
            self.settle()
            self._kv.reserve(start + count, keep=start)
            self._extend_rope(start + count)
            shape = (count, self.vocab_size) if all_logits else (1, self.vocab_size)
            logits = np.empty(shape, np.float32)
            size = _BATCH_MOE if self.config.num_experts else _BATCH
            with np.errstate(all="ignore"):  # what is not finite is found and named below
                for lo in range(0, count, size):
                    hi = min(count, lo + size)
                    x = self._run_layers(tokens[lo:hi], start + lo)
                    if all_logits:
                        self._logits(x, start + lo, logits[lo:hi])
                    elif hi == count:
                        self._logits(x[-1:], start + count - 1, logits)
        except MemoryError as error:
            raise OutOfMemory(
                f"a pass over {count} tokens at position {start} ran out of memory ({error}); try "
                "fewer tokens, a smaller --ctx-size or a smaller --cpu-cache"
            ) from None
        # Only now: whatever was raised above, the sequence is as it was before the call.
        self._position = start + count
        return logits if all_logits else logits[0]

    def truncate(self, position: int) -> None:
        check_truncation(self, position)
        self._position = position

    def copy_rows(self, lo: int, hi: int) -> list[StoredRows]:
        """K and V of the positions ``lo`` to ``hi``, layer by layer, as they are stored."""
        return self._kv.copy_rows(lo, hi)

    def put_rows(self, layer: int, lo: int, rows: StoredRows) -> None:
        """K and V of one layer from position ``lo`` on, as an engine of the same K/V kind has
        them; there is room for them, as a pass is going on that needs it."""
        self._kv.put_rows(layer, lo, rows)

    @property
    def threads(self) -> int:
        """Of the work outside BLAS."""
        return self._workers.count

    def matrices(self) -> list[Linear]:
        """Every matrix, in the order a token reads them; routed experts come last."""
        dense, routed = self._linears()
        return dense + routed

    def settle(self) -> None:
        """Wait until no thread writes any more: after an interrupt one may."""
        self._workers.settle()

    def lay_out(self, elsewhere: Container[Place] = ()) -> None:
        """Every matrix that is not laid out yet but those that a device does compute."""
        wanted = (linear for linear in self.matrices() if linear.place not in elsewhere)
        lay_out_all(wanted, self._workers)

    def router(self, layer: int) -> F32:
        """A copy of the router ``[E, H]`` of a layer with experts."""
        moe = self._layers[layer].moe
        if moe is None:
            raise UsageError(f"layer {layer} has no experts")
        return np.array(moe.router.T, order="C")

    def take_over(self, position: int, lo: int, layers: Iterable[StoredRows]) -> None:
        """Be at ``position``: keep the rows below ``lo``, take those from there on from an engine
        of the same K/V kind."""
        self._check_open()
        if not 0 <= lo <= self._position or not lo <= position <= self.ctx_size:
            raise UsageError(f"rows {lo} to {position} cannot follow {self._position} tokens")
        self._kv.reserve(position, keep=lo)
        for layer, rows in enumerate(layers):
            self._kv.put_rows(layer, lo, rows)
        self._position = position

    def close(self) -> None:
        self._workers.close()
        self._closed = True
        self._position = 0
        self._layers = []
        self._kv.rows, self._kv.scales = [], []
        for name in [
            "_head",
            "_embed",
            "_store",
            "_cache",
            "_one",
            "_batch",
            "_batch_scratch",
            "_cos",
            "_sin",
        ]:
            self.__dict__.pop(name, None)
        self._workers = Workers(1)

    def warm_up(self) -> None:
        """Expand now what stays expanded, as the first prompt otherwise would."""
        self._check_open()
        self._cache.expand_all(self._linears()[0])

    def stats(self) -> dict[str, int | bool]:
        """Bytes of weights, K/V and expanded matrices as they are now, and the cache's counts."""
        self._check_open()
        dense, routed = self._linears()
        embedding = 0 if self._embed is None else int(self._embed.nbytes)
        return {
            "weights_bytes": embedding + sum(linear.nbytes for linear in dense + routed),
            "kv_bytes": self._kv.nbytes,
            "host_wanted": self._store.memory + self._store.spilled,
            "spilled_bytes": self._store.spilled,
            "threads": self._workers.count,
            **self._cache.stats(),
        }

    def _check_open(self) -> None:
        check_open(self._closed)

    # ---- the forward pass

    def _run_layers(self, tokens: NDArray[np.int64], position: int) -> F32:
        """The residual stream ``[M, H]`` after all layers, before the final norm."""
        m = len(tokens)
        b = self._one if m == 1 else self._buffers(m)
        cos, sin = self._cos[position : position + m], self._sin[position : position + m]
        scratch = self._workers.scratch
        x = b.x
        self._embed_tokens(tokens, x)
        done = 0  # layers that a device has taken
        for i, layer in enumerate(self._layers):
            if self.offload is not None and i >= done:
                done = self.offload.layers(i, x, position)
            if i < done:
                continue
            # attention
            self._norm(x, layer.input_norm, b.normed, i - 1, "MLP", position)
            self._product(layer.qkv, b.normed, b.qkv)
            self._show(i, "qkv", b.qkv)
            if layer.head_norms is not None:
                head_norm(b.qk_heads, layer.head_norms, self.config.rms_norm_eps, b.qk_spare)
            rotate(b.qk_halves, cos, sin, b.halves_spare)
            self._kv.write(i, position, b.kv, b.kv_spare)
            if self.on_row is not None:
                row = self.on_row(i, self._kv.copy_layer(i, position, position + m))
                self._kv.put_rows(i, position, row)
            if m == 1:
                heads = b.attended_heads[0]
                attend_one(b.q[0], self._kv, i, position, layer.window, heads, scratch)
            else:
                heads = b.attended_heads
                attend_many(b.q, self._kv, i, position, layer.window, heads, scratch)
            self._show(i, "attended", b.attended)
            self._product(layer.o, b.attended, b.delta)
            x += b.delta
            self._show(i, "after_attention", x)
            # MLP or experts
            self._norm(x, layer.post_norm, b.normed, i, "attention", position)
            if layer.moe is not None:
                show = None if self.trace is None else partial(self._show, i)
                to = self.offload
                mix_experts(layer.moe, b.normed, b.delta, self._cache, self._workers, show, to)
            elif layer.gate_up is not None and layer.down is not None:
                self._product(layer.gate_up, b.normed, b.gate_up)
                silu_times(b.gate, b.up, b.hidden)
                self._show(i, "hidden", b.hidden)
                self._product(layer.down, b.hidden, b.delta)
            x += b.delta
            self._show(i, "after_mlp", x)
        return x

    def _show(self, layer: int, quantity: str, values: F32) -> None:
        if self.trace is not None:
            self.trace(layer, quantity, values)

    def _logits(self, x: F32, position: int, out: F32) -> None:
        """Logits ``out [M, V]`` of ``x [M, H]``, the first row of which is at ``position``."""
        normed = np.empty_like(x)
        self._norm(x, self._final_norm, normed, len(self._layers) - 1, "MLP", position)
        self._product(self._head, normed, out)
        if not np.isfinite(np.add.reduce(out, axis=None)):
            raise NumericsError(
                f"the logits at position {position} or after hold a NaN or an infinity, which "
                "came out of the head; check the model's files"
            )

    def _product(self, linear: Linear, x: F32, out: F32) -> None:
        if self.offload is None:
            self._multiply(linear, x, out)
        else:
            self.offload.products(x, out, [Job(linear, len(x))], self._on_cpu)

    def _on_cpu(self, x: F32, out: F32, jobs: Sequence[Job]) -> None:
        for linear, rows, first, to in jobs:
            self._multiply(linear, x[first : first + rows], out[to : to + rows])

    def _multiply(self, linear: Linear, x: F32, out: F32) -> None:
        if self._cache.ready(linear, len(x)):
            multiply(linear, x, out, self._workers)
        else:
            multiply_codes(linear, x, out, self._workers)

    def _norm(self, x: F32, weight: F32, out: F32, layer: int, block: str, position: int) -> None:
        """RMSNorm, which also finds what the block before it has broken."""
        if rms_norm(x, weight, self.config.rms_norm_eps, out):
            return
        row = int(np.argmin(np.isfinite(np.einsum("mh,mh->m", x, x))))
        where = "the embedding" if layer < 0 else f"the {block} of layer {layer}"
        raise NumericsError(
            f"a NaN or an infinity came out of {where} at position {position + row}; check the "
            "model's files, or try --quant bf16 if they were quantised"
        )

    def _embed_tokens(self, tokens: NDArray[np.int64], out: F32) -> None:
        if self._embed is None:
            for i, token in enumerate(tokens.tolist()):
                out[i] = self._head.row(token)
        elif isinstance(self._embed, QTensor):
            q = self._embed
            shape = (len(tokens), q.shape[1])
            dequantize(QTensor(q.kind, shape, q.codes[tokens], q.scales[tokens]), out)
        else:
            bf16_to_f32(self._embed[tokens], out)

    def _buffers(self, rows: int) -> Buffers:
        if self._batch is None or self._batch.rows != rows:
            self._batch = Buffers(self.config, self._batch_scratch, rows)
        return self._batch

    def _extend_rope(self, positions: int) -> None:
        have = len(self._cos)
        if positions <= have:
            return
        size = min(self.ctx_size, max(positions, 2 * have, 256))
        cos, sin = rope_table(self.config, size)
        # As `rotate` wants them: one cos for both halves of a head, sin with the sign of each.
        self._cos = cos[:, None, None]
        self._sin = np.stack([-sin, sin], axis=1)[:, None]


def _join(*biases: F32 | None) -> F32 | None:
    given = [bias for bias in biases if bias is not None]
    return np.concatenate(given).astype(np.float32) if len(given) == len(biases) else None


__all__ = ["CpuEngine", "memory_needed"]
