"""The CPU engine against the plain meaning of a transformer, and against itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cpu_models import Case, cases, engine_of, make_config, make_weights, moe_config, plain_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pykestrel.engine.cpu import CpuEngine, attention, blocks, engine

KVS = ["int8", "f16", "f32"]


def close(got: NDArray[Any], want: NDArray[Any], tolerance: float) -> None:
    """Within ``tolerance`` of the largest logit."""
    assert got.shape == want.shape
    error, size = np.abs(got - want).max(), np.abs(want).max()
    assert error <= tolerance * size, f"off by {error:.2e} of {size:.2e}"


def one_by_one(model: CpuEngine, ids: list[int]) -> NDArray[np.float32]:
    return np.stack([model.forward([i]) for i in ids])


@contextlib.contextmanager
def small_pieces() -> Iterator[None]:
    """Blocks, batches and tiles so small that a short prompt has several of each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", 24)
        patch.setattr(engine, "_BATCH", 7)
        patch.setattr(engine, "_BATCH_MOE", 5)
        patch.setattr(attention, "_DECODE_TILE", 100)
        patch.setattr(attention, "_SCORES", 60)
        patch.setattr(attention, "_QUERIES", 3)
        yield


# ---- what it computes


@given(cases())
@settings(max_examples=60)
def test_one_pass_is_the_plain_meaning(case: Case) -> None:
    got = engine_of(case.weights).forward(case.ids, all_logits=True)
    close(got, plain_logits(case.weights, case.ids), 1e-4)


@given(cases(), st.sampled_from([0, None]))
@settings(max_examples=40)
def test_token_by_token_is_the_plain_meaning(case: Case, cpu_cache: int | None) -> None:
    got = one_by_one(engine_of(case.weights, cpu_cache=cpu_cache), case.ids)
    close(got, plain_logits(case.weights, case.ids), 1e-4)


@given(cases(), st.sampled_from([0, None]))
@settings(max_examples=40)
def test_in_many_small_pieces_it_is_the_same(case: Case, cpu_cache: int | None) -> None:
    with small_pieces():
        model = engine_of(case.weights, cpu_cache=cpu_cache)
        got = model.forward(case.ids, all_logits=True)
        close(got, plain_logits(case.weights, case.ids), 1e-4)
        model.truncate(len(case.ids) // 2)
        rest = one_by_one(model, case.ids[len(case.ids) // 2 :])
        close(rest, got[len(case.ids) // 2 :], 1e-4)


@given(cases(moe=True))
@settings(max_examples=30)
def test_experts_of_a_batch_and_of_single_tokens(case: Case) -> None:
    """A batch goes expert by expert, a token through all its experts at once."""
    model = engine_of(case.weights, cpu_cache=0)
    got = model.forward(case.ids, all_logits=True)
    close(got, plain_logits(case.weights, case.ids), 1e-4)
    model.truncate(0)
    close(one_by_one(model, case.ids), got, 1e-4)


@pytest.mark.parametrize("ratio", range(1, 9))
@pytest.mark.parametrize("window", [None, 4])
def test_every_ratio_of_query_to_kv_heads(ratio: int, window: int | None) -> None:
    config = make_config(num_attention_heads=2 * ratio, layer_window=(window, None))
    weights = make_weights(config)
    ids = list(range(30))
    want = plain_logits(weights, ids)
    model = engine_of(weights)
    close(model.forward(ids, all_logits=True), want, 1e-4)
    model.truncate(0)
    close(one_by_one(model, ids), want, 1e-4)


def test_only_the_last_logits_unless_all_are_asked_for() -> None:
    weights = make_weights(make_config())
    model = engine_of(weights)
    every = model.forward([3, 1, 4], all_logits=True)
    assert every.shape == (3, 80)
    assert every.dtype == np.float32
    model.truncate(0)
    last = model.forward([3, 1, 4])
    assert last.shape == (80,)
    close(last, every[-1], 1e-6)
    kept = last.copy()
    model.forward([1])
    np.testing.assert_array_equal(last, kept)  # the array is the caller's


def test_prefill_leaves_no_trace_of_how_it_was_cut() -> None:
    """Positions, K/V and logits after any partition of the prompt."""
    weights = make_weights(make_config(layer_window=(5, None)), "q8")
    ids = [int(i) for i in np.random.default_rng(0).integers(0, 80, 40)]
    whole = engine_of(weights, kv="int8").forward(ids)
    for cut in (1, 2, 3, 13, 39):
        model = engine_of(weights, kv="int8")
        model.forward(ids[:cut])
        assert model.position == cut
        close(model.forward(ids[cut:]), whole, 1e-4)


@pytest.mark.parametrize("layers", [1, 3])
def test_contributions_are_added_in_the_routers_order(layers: int) -> None:
    """With weights of very different size the order shows in the last bits."""
    from pykestrel.engine.cpu.moe import mix_experts
    from pykestrel.engine.cpu.norm import silu_times

    weights = make_weights(moe_config(num_hidden_layers=layers), seed=layers)
    model = engine_of(weights, cpu_cache=0)
    layer = model._layers[-1].moe
    assert layer is not None
    x = np.random.default_rng(layers).standard_normal((9, 64)).astype(np.float32)
    out = np.empty_like(x)
    mix_experts(layer, x, out, model._cache, model._workers)
    p = np.exp(x @ layer.router - (x @ layer.router).max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    for row in range(9):
        order = np.argsort(-p[row], kind="stable")[:3]
        total = np.zeros(64, np.float32)
        for e in order:
            gu = layer.gate_up[e].expand(model._workers).T @ x[row]
            hidden = np.empty(48, np.float32)
            silu_times(gu[:48], gu[48:], hidden)
            y = layer.down[e].expand(model._workers).T @ hidden
            total += y * (p[row, e] / p[row, order].sum())
        np.testing.assert_allclose(out[row], total, rtol=1e-4, atol=1e-5)


def test_router_takes_the_lower_index_on_a_tie() -> None:
    from pykestrel.engine.cpu.moe import MoeLayer, route

    router = np.zeros((4, 6), np.float32)
    router[:, 4] = 1.0
    layer = MoeLayer(router, [], [], experts_per_token=3, norm_topk_prob=False)
    chosen, weights = route(layer, np.ones((2, 4), np.float32))
    assert chosen.tolist() == [[4, 0, 1]] * 2
    assert weights[0, 1] == weights[0, 2]


def test_a_huge_gate_is_no_overflow() -> None:
    from pykestrel.engine.cpu.norm import silu_times

    gate = np.array([[-1e4, -90.0, 0.0, 90.0, 1e4]], np.float32)
    out = np.empty_like(gate)
    with np.errstate(over="ignore"):
        silu_times(gate, np.ones_like(gate), out)
    np.testing.assert_allclose(out, [[0, 0, 0, 90, 1e4]], atol=1e-30)


# ---- K/V formats


@pytest.mark.parametrize("kv", KVS)
@pytest.mark.parametrize("make", [make_config, moe_config])
def test_kv_formats(kv: str, make: Any) -> None:
    weights = make_weights(make(num_hidden_layers=1, layer_is_moe=(make is moe_config,)))
    ids = list(range(50))
    want = plain_logits(weights, ids)
    model = engine_of(weights, kv=kv)
    got = model.forward(ids, all_logits=True)
    close(got, want, {"f32": 1e-4, "f16": 5e-3, "int8": 5e-2}[kv])
    model.truncate(0)
    # One pass and single tokens read the same stored rows: nearer to each other than to float32.
    close(one_by_one(model, ids), got, 1e-4 if kv == "f32" else 2e-3)


@given(st.integers(0, 100), st.sampled_from([1e-38, 1e-20, 1e-3, 1.0, 1e4, 1e30]))
def test_int8_rows_are_within_half_a_step(seed: int, size: float) -> None:
    from pykestrel.engine.cpu.kv_cache import KVCache

    kv = KVCache(make_config(), 64, "int8")
    kv.reserve(9, keep=0)
    rows = (np.random.default_rng(seed).standard_normal((9, 2, 2, 16)) * size).astype(np.float32)
    rows[3, 0, 1] = 0
    kv.write(1, 0, rows.copy(), np.empty_like(rows))
    for which in (0, 1):
        for head in (0, 1):
            got = kv.head(1, which, head, 0, 9, np.empty((9, 16), np.float32))
            want = rows[:, which, head]
            step = np.maximum(np.abs(want).max(-1, keepdims=True) / 127, 1e-30)
            assert (np.abs(got - want) <= step * 0.501).all()


@pytest.mark.parametrize("kv", KVS)
def test_memory_for_kv_grows_with_the_sequence(kv: str) -> None:
    config = make_config()
    model = engine_of(make_weights(config), ctx_size=3000, kv=kv)
    assert model.stats()["kv_bytes"] == 0
    model.forward([1])
    small = model.stats()["kv_bytes"]
    for _ in range(3):
        model.forward([2] * 100)
    one = engine_of(make_weights(config), ctx_size=3000, kv=kv)
    close(model.forward([5]), one.forward([1] + [2] * 300 + [5]), 2e-3)
    assert small < model.stats()["kv_bytes"] < 3000 / 256 * small
    model.forward([3] * (3000 - model.position))
    assert model.stats()["kv_bytes"] == engine.kv_bytes(config, 3000, kv)


@pytest.mark.parametrize("kv", KVS)
def test_rows_for_another_engine(kv: str) -> None:
    config = make_config()
    model = engine_of(make_weights(config), kv=kv)
    model.forward([1, 2, 3, 4, 5])
    layers = model._kv.copy_rows(1, 4)
    assert len(layers) == 2
    for k, v, k_scale, v_scale in layers:
        assert k.shape == v.shape == (3, config.kv_dim)
        assert k_scale.shape == v_scale.shape == (3, 2 if kv == "int8" else 0)
    scale = layers[1][3][2, 1] if kv == "int8" else 1.0
    stored = model._kv.head(1, 1, 1, 3, 4, np.empty((1, 16), np.float32))[0]
    np.testing.assert_allclose(layers[1][1][2, 16:] * scale, stored, rtol=1e-6)


# ---- truncation


@given(cases(), st.data())
@settings(max_examples=30)
def test_truncate_and_go_on_is_as_if_fresh(case: Case, data: st.DataObject) -> None:
    ids = case.ids
    cut = data.draw(st.integers(0, len(ids)))
    model = engine_of(case.weights, kv=data.draw(st.sampled_from(KVS)))
    model.forward(ids)
    model.truncate(cut)
    assert model.position == cut
    other = [(i * 7 + 3) % case.config.vocab_size for i in range(5)]
    got = model.forward(other, all_logits=True)
    fresh = engine_of(case.weights, kv=model._kv.kind)
    want = fresh.forward(ids[:cut] + other, all_logits=True)[cut:]
    # A batch may round a key just over the edge of an int8 step that another batch stays below.
    close(got, want, 1e-4 if model._kv.kind == "f32" else 2e-2)


# ---- the cache of expanded weights


def expanded_bytes(model: CpuEngine) -> int:
    dense, routed = model._linears()
    return sum(x.expanded_bytes for x in dense + routed if x.expanded is not None)


@pytest.mark.parametrize("quant", ["bf16", "q8", "q4"])
@pytest.mark.parametrize("make", [make_config, moe_config])
def test_logits_do_not_depend_on_the_budget(quant: str, make: Any) -> None:
    weights = make_weights(make(tie_word_embeddings=False), quant)
    ids = list(range(40))
    results = []
    for budget in (0, 1, 20_000, 100_000, 200_000, 1 << 30, None):
        model = engine_of(weights, cpu_cache=budget)
        prefill = model.forward(ids, all_logits=True)
        model.forward(ids[:20])
        decode = model.forward([7])
        stats = model.stats()
        assert stats["expanded_bytes"] == expanded_bytes(model)
        if budget is not None:
            assert stats["expanded_bytes"] <= budget
        results.append((prefill, decode))
    for prefill, decode in results[1:]:
        close(prefill, results[0][0], 1e-5)
        close(decode, results[0][1], 1e-5)


def test_with_room_for_all_every_token_goes_through_blas() -> None:
    weights = make_weights(make_config(), "q8")
    model = engine_of(weights, cpu_cache=1 << 30)
    model.forward([1])
    stats = model.stats()
    assert stats["decode_blas"]
    assert stats["expansions"] == 2 * 4 + 1
    assert stats["hits"] == 0
    model.forward([2])
    assert model.stats()["expansions"] == 9
    assert model.stats()["hits"] == 9


def test_a_small_budget_stays_with_the_same_matrices() -> None:
    """Under cyclic access a cache that exchanges its entries would never hit."""
    weights = make_weights(make_config(num_hidden_layers=4), "q8")
    model = engine_of(weights, cpu_cache=100_000)
    model.forward(list(range(20)))
    first = model.stats()
    assert 0 < first["expansions"] < 4 * 4 + 1
    assert not first["decode_blas"]
    for _ in range(3):
        model.truncate(0)
        model.forward(list(range(20)))
    stats = model.stats()
    assert stats["expansions"] == first["expansions"]
    assert stats["hits"] == 3 * first["expansions"]
    assert stats["evictions"] == 0


def test_experts_used_most_are_kept() -> None:
    from pykestrel.engine.cpu.cache import WeightCache
    from pykestrel.engine.cpu.workers import Workers

    weights = make_weights(moe_config(), "q8")
    model = engine_of(weights, cpu_cache=0)
    moe = model._layers[0].moe
    assert moe is not None
    size = moe.down[0].expanded_bytes
    cache = WeightCache(2 * size, Workers(1))
    for e in (0, 1, 2, 2, 2, 0, 0, 0, 1):
        cache.prepare_expert(moe.down[e])
    kept = {e for e in range(6) if moe.down[e].expanded is not None}
    assert kept == {0, 2}
    assert cache.stats()["evictions"] == 2  # 0 for 2, and 1 for 0 again
    assert cache.stats()["expanded_bytes"] == 2 * size


def test_weights_are_held_once() -> None:
    """The engine lays them out anew and lets go of what it got."""
    config = make_config(num_hidden_layers=3, qkv_bias=True)
    for quant in ("bf16", "q8", "q4"):
        weights = make_weights(config, quant)
        model = CpuEngine(weights, ctx_size=16)
        assert weights.layers == []
        assert not hasattr(weights, "embed")
        assert weights.head is None
        from pykestrel.engine.cpu import memory_needed

        vectors = sum(
            v.nbytes
            for layer in model._layers
            for v in (layer.input_norm, layer.post_norm, layer.head_norms)
            if v is not None
        )
        held = model.stats()["weights_bytes"] + vectors + model._final_norm.nbytes
        need = memory_needed(config, quant, 16, "int8")["weights"]
        assert abs(held - need) <= 0.02 * need  # head_norms are repeated for every head


def test_every_float16_is_widened_to_the_same_number() -> None:
    from pykestrel.engine.cpu.kv_cache import KVCache, widen_f16

    every = np.arange(65536, dtype=np.uint16).view(np.float16)
    want = every.astype(np.float32)
    finite = np.isfinite(want)
    got = np.empty_like(want)
    widen_f16(every, got)
    assert got[finite].tobytes() == want[finite].tobytes()
    # strided, as one head of the rows is; and what is not finite stays so
    config = make_config(num_hidden_layers=1)
    shape = (64, 2, config.num_key_value_heads, config.head_dim)
    values = np.resize(every[finite], shape).astype(np.float32)
    for broken in (None, np.inf, np.nan):
        kv = KVCache(config, 64, "f16")
        kv.reserve(64, 0)
        if broken is not None:
            values[5, 1, 1, 3] = broken
        kv.write(0, 0, values.copy(), np.empty_like(values))
        out = np.empty((64, config.head_dim), np.float32)
        assert kv.head(0, 1, 1, 0, 64, out).tobytes() == values[:, 1, 1].tobytes()
        other = KVCache(config, 64, "f16")
        other.reserve(64, 0)
        other.put_rows(0, 0, kv.copy_layer(0, 0, 64))
        assert other.head(0, 1, 1, 0, 64, out).tobytes() == values[:, 1, 1].tobytes()
