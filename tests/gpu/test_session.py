"""One sequence on the device: the K/V of an earlier prompt is used again, exactly, and a prompt
that does not fit never gets there."""

from __future__ import annotations

from typing import Any

import pytest

import pykestrel
from pykestrel import ContextError, Model, native

from .conftest import CudaLib
from .device_models import DATA

pytestmark = pytest.mark.usefixtures("nothing_left")

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
A = [5, 6, 7, 8, 9, 10, 11]
B = [5, 6, 7, 100, 101]


def load(device: str, case: str = "qwen3-tied", **options: Any) -> Model:
    return pykestrel.load(DATA / case, device=device, quant="bf16", **{"ctx_size": 40, **options})


def greedy(model: Model, ids: list[int], n: int = 5) -> list[int]:
    return model.generate(ids, max_tokens=n, **GREEDY).tokens


def tokens_run(model: Model) -> int:
    """Tokens that went through the engine so far."""
    engine = model.session.engine
    handle = getattr(engine, "handle", None)
    return native.prof_read(handle).tokens if handle is not None else -1


@pytest.mark.parametrize("kv", ["int8", "f16"])
@pytest.mark.parametrize("case", ["qwen3-tied", "qwen3-moe-mixed"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_then_b_then_a(cuda_lib: CudaLib, device: str, case: str, kv: str) -> None:
    with load(device, case, kv=kv) as fresh:
        want_a = greedy(fresh, A)
    with load(device, case, kv=kv) as fresh:
        want_b = greedy(fresh, B)
    with load(device, case, kv=kv) as model:
        for ids, want, kept in ((A, want_a, 0), (B, want_b, 3), (A, want_a, 3)):
            before = tokens_run(model)
            out = model.generate(ids, max_tokens=5, **GREEDY)
            assert out.tokens == want
            assert out.timings.reused_tokens == kept
            if before >= 0:  # the last token is not fed back
                assert tokens_run(model) - before == len(ids) - kept + 4
        # the whole of it is there now, and its last id has to run for its logits
        again = model.generate(A, max_tokens=5, **GREEDY)
        assert (again.tokens, again.timings.reused_tokens) == (want_a, len(A) - 1)
        # what was generated is K/V like any other
        longer = [*A, *want_a[:4], 3]
        grown = model.generate(longer, max_tokens=3, **GREEDY)
        assert grown.timings.reused_tokens == len(A) + 4
    with load(device, case, kv=kv) as fresh:
        assert greedy(fresh, longer, 3) == grown.tokens


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_through_the_session(cuda_lib: CudaLib, device: str) -> None:
    with load(device, kv="f16") as model:
        session = model.session
        want = session.prompt(A).copy()
        session.prompt(B)
        assert session.seen == B
        assert session.shared_prefix(A) == 3
        again = session.prompt(A)
        assert session.seen == A
        assert again.argmax() == want.argmax()
        assert abs(again - want).max() < 2e-2 * want.std()
        assert session.shared_prefix(A) == len(A) - 1
        assert session.shared_prefix(A[:3]) == 2  # a prompt that ends inside what is there


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_prompt_longer_than_the_context_launches_nothing(cuda_lib: CudaLib, device: str) -> None:
    with load(device, ctx_size=16) as model:
        greedy(model, A)
        handle = getattr(model.session.engine, "handle", None)
        before = None if handle is None else native.prof_read(handle)
        seen = list(model.session.seen)
        for call in (
            lambda: model.generate([5] * 17),
            lambda: model.generate([5] * 16),
            lambda: model.stream([5] * 17),
            lambda: model.logits([5] * 17),
        ):
            with pytest.raises(ContextError, match=r"has 1[67] tokens and the context holds 16"):
                call()
        if handle is not None:
            assert native.prof_read(handle) == before
        assert model.session.seen == seen  # and nothing was forgotten
        assert model.generate(A, max_tokens=1, **GREEDY).timings.reused_tokens == len(A) - 1
