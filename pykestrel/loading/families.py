"""Which tensor of a file fills which weight: tables of names, and the plan made from them.

The rule that keeps a model from being nonsense: every expected tensor is filled exactly once,
with exactly the expected shape, and every extra tensor is accounted for. `make_plan` checks that
before anything is read or allocated.

N output features, K input features, E experts, H hidden_size, F (moe_)intermediate_size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..config import ModelConfig
from ..errors import ModelError
from .jsonfile import shown
from .tensors import PLAIN, TensorInfo, TensorTable, same_bytes

# Fields of LayerWeights and their names in Hugging Face files, below "layers.{i}.".
HF_LAYER = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "router": "mlp.gate.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
}
HF_EXPERT = {  # one tensor an expert
    "gate": "mlp.experts.{e}.gate_proj.weight",
    "up": "mlp.experts.{e}.up_proj.weight",
    "down": "mlp.experts.{e}.down_proj.weight",
}
HF_STACK = {  # [E, N, K] stacks: the canonical names of this project's own files
    "gate": "mlp.experts.gate_proj.weight",
    "up": "mlp.experts.up_proj.weight",
    "down": "mlp.experts.down_proj.weight",
}
HF_FUSED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
# Where the text model is, and its head, by version and family of the file.
HF_PREFIXES = (
    ("model.", "lm_head.weight"),
    ("model.language_model.", "lm_head.weight"),
    ("language_model.model.", "language_model.lm_head.weight"),
    ("language_model.", "lm_head.weight"),
    ("", "lm_head.weight"),
)
HF_TOP = {"embed": "embed_tokens.weight", "final_norm": "norm.weight"}
# Buffers that older files carry: they are computed from config.json.
HF_BUFFERS = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")
HF_VISION = re.compile(r"(model\.)?visual\..*")

GGUF_LAYER = {
    "input_norm": "attn_norm.weight",
    "post_norm": "ffn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "router": "ffn_gate_inp.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "gate_bias": "ffn_gate.bias",
    "up_bias": "ffn_up.bias",
    "down_bias": "ffn_down.bias",
}
GGUF_STACK = {
    "gate": "ffn_gate_exps.weight",
    "up": "ffn_up_exps.weight",
    "down": "ffn_down_exps.weight",
}
GGUF_FUSED = ("ffn_gate_up_exps.weight", "ffn_down_exps.weight")
GGUF_TOP = {"embed": "token_embd.weight", "final_norm": "output_norm.weight"}
GGUF_HEAD = "output.weight"
GGUF_BUFFERS = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")

MATRICES = ("embed", "head", "q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True)
class Piece:
    """Where one matrix (of an expert, if it is a stack) comes from."""

    info: TensorInfo
    row: int = 0  # first row in the 2-D view of the tensor
    rows: int = 0
    columns: tuple[int, int] | None = None  # stored [K, N]: take these columns and transpose
    order: NDArray[np.intp] | None = None  # row r is row order[r] of the file


@dataclass(frozen=True)
class Target:
    """One weight to fill: `field` of `layer` (None: of the model)."""

    layer: int | None
    field: str
    name: str  # canonical Hugging Face name, of messages and of the files that we write
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]  # one; for a stack of experts E

    @property
    def is_matrix(self) -> bool:
        return self.field in MATRICES

    @cached_property
    def nbytes(self) -> int:
        """Bytes to read from the files."""
        return sum(
            p.info.nbytes // max(1, p.info.rows) * p.rows if p.info.rows else 0 for p in self.pieces
        )


@dataclass
class Plan:
    """All weights of a model and the tensors that fill them."""

    targets: list[Target] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # tensors of parts that are not run: visual.*

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.targets)


def canonical_name(layer: int | None, name: str, stacked: bool) -> str:
    """The Hugging Face name of a weight, whatever file it came from."""
    if layer is None:
        return "lm_head.weight" if name == "head" else "model." + HF_TOP[name]
    table = HF_STACK if stacked and name in HF_STACK else HF_LAYER
    return f"model.layers.{layer}.{table[name]}"


def expected_shapes(config: ModelConfig) -> Iterable[tuple[int | None, str, tuple[int, ...]]]:
    """(layer, field, shape) of every weight that a model of this configuration has."""
    c, hidden = config, config.hidden_size
    yield None, "embed", (c.vocab_size, hidden)
    yield None, "final_norm", (hidden,)
    if not c.tie_word_embeddings:
        yield None, "head", (c.vocab_size, hidden)
    for i in range(c.num_hidden_layers):
        yield i, "input_norm", (hidden,)
        yield i, "q", (c.q_dim, hidden)
        yield i, "k", (c.kv_dim, hidden)
        yield i, "v", (c.kv_dim, hidden)
        yield i, "o", (hidden, c.q_dim)
        yield i, "post_norm", (hidden,)
        if c.qk_norm:
            yield i, "q_norm", (c.head_dim,)
            yield i, "k_norm", (c.head_dim,)
        if c.qkv_bias:
            yield i, "q_bias", (c.q_dim,)
            yield i, "k_bias", (c.kv_dim,)
            yield i, "v_bias", (c.kv_dim,)
        if c.o_bias:
            yield i, "o_bias", (hidden,)
        if c.layer_is_moe[i]:
            experts, width = c.num_experts, c.moe_intermediate_size
            yield i, "router", (experts, hidden)
            yield i, "gate", (experts, width, hidden)
            yield i, "up", (experts, width, hidden)
            yield i, "down", (experts, hidden, width)
            continue
        width = c.intermediate_size
        yield i, "gate", (width, hidden)
        yield i, "up", (width, hidden)
        yield i, "down", (hidden, width)
        if c.mlp_bias:
            yield i, "gate_bias", (width,)
            yield i, "up_bias", (width,)
            yield i, "down_bias", (hidden,)


class _Planner:
    def __init__(self, config: ModelConfig, table: TensorTable, path: Path, gguf: bool) -> None:
        self.config, self.table, self.path, self.gguf = config, table, path, gguf
        self.plan = Plan()
        self.used: set[str] = set()
        self.missing: list[str] = []
        self.prefix, self.head = ("blk.", GGUF_HEAD) if gguf else self._find_prefix()

    def _find_prefix(self) -> tuple[str, str]:
        found = [p for p in HF_PREFIXES if p[0] + HF_TOP["embed"] in self.table]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(p[0] + HF_TOP["embed"] for p in found)
            raise ModelError(f"{self.path} holds more than one text model ({names})")
        raise ModelError(
            f"{self.path} does not hold model.{HF_TOP['embed']} (it holds {some(self.table)}), so "
            f"it is no {self.config.model_type} model as transformers saves it"
        )

    def file_name(self, layer: int | None, name: str) -> str:
        if layer is None:
            if name == "head":
                return self.head
            return GGUF_TOP[name] if self.gguf else self.prefix + HF_TOP[name]
        return self.layer_prefix(layer) + (GGUF_LAYER if self.gguf else HF_LAYER)[name]

    def layer_prefix(self, layer: int) -> str:
        return f"blk.{layer}." if self.gguf else f"{self.prefix}layers.{layer}."

    def take(self, name: str, shape: Sequence[int]) -> TensorInfo | None:
        """The tensor ``name``, which must have ``shape``; a missing one is only noted."""
        info = self.table.get(name)
        if info is None:
            self.missing.append(name)
            return None
        check_tensor(info, shape)
        self.used.add(name)
        return info

    def run(self) -> Plan:
        for layer, name, shape in expected_shapes(self.config):
            if len(shape) == 3:
                assert layer is not None
                pieces = self.expert_pieces(layer, name, shape)
            else:
                info = self.take(self.file_name(layer, name), shape)
                order = self.row_order(name) if info is not None else None
                pieces = () if info is None else (Piece(info, 0, info.rows, None, order),)
            target = canonical_name(layer, name, len(shape) == 3)
            self.plan.targets.append(Target(layer, name, target, shape, pieces))
            if len(self.missing) > 1000:  # a configuration of many more layers than there are
                break
        if self.missing:
            self._fail_missing()
        self._account_for_rest()
        return self.plan

    def row_order(self, name: str) -> NDArray[np.intp] | None:
        """GGUF files of llama hold the rows of q and k in the order of interleaved rotation.

        llama.cpp rotates neighbours (2i, 2i + 1), transformers the halves (i, i + head_dim / 2);
        the converter moves row (half, i) of each head to (i, half), and this moves it back.
        """
        if not self.gguf or self.config.model_type != "llama" or name[0] not in "qk":
            return None
        if name not in ("q", "k", "q_bias", "k_bias"):
            return None
        heads = self.config.num_attention_heads
        if name[0] == "k":
            heads = self.config.num_key_value_heads
        half = self.config.head_dim // 2
        rows = np.arange(heads * 2 * half).reshape(heads, half, 2)
        return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)

    def expert_pieces(self, layer: int, name: str, shape: tuple[int, ...]) -> tuple[Piece, ...]:
        """The E matrices [N, K] of a stack: one tensor an expert, one stack, or fused gate-up."""
        experts, n, k = shape
        prefix = self.layer_prefix(layer)
        stack = prefix + (GGUF_STACK if self.gguf else HF_STACK)[name]
        fused = tuple(prefix + f for f in (GGUF_FUSED if self.gguf else HF_FUSED))
        if stack in self.table and not (name == "down" and fused[0] in self.table):
            info = self.take(stack, shape)
            assert info is not None
            return tuple(Piece(info, e * n, n) for e in range(experts))
        if fused[0] in self.table or fused[1] in self.table:
            return self._fused_pieces(fused, name, shape)
        if self.gguf:
            self.take(stack, shape)
            return ()
        pieces = []
        for e in range(experts):
            info = self.take(prefix + HF_EXPERT[name].format(e=e), (n, k))
            if info is not None:
                pieces.append(Piece(info, 0, n))
        return tuple(pieces)

    def _fused_pieces(
        self, fused: tuple[str, ...], name: str, shape: tuple[int, ...]
    ) -> tuple[Piece, ...]:
        """gate_up_proj [E, 2F, H] and down_proj [E, H, F], or both with the last two swapped.

        transformers keeps them as linear layers do, [.., N, K]; the files of Qwen3-VL-MoE have
        [.., K, N]. The shapes tell, and the two tensors of a layer must say the same. (Both could
        be read either way only if 2F == H and F == H at once.)
        """
        experts, n, k = shape
        width, hidden = (n, k) if name != "down" else (k, n)
        straight = ((experts, 2 * width, hidden), (experts, hidden, width))
        swapped = ((experts, hidden, 2 * width), (experts, width, hidden))
        both = [self.table.get(f) for f in fused]
        shapes = tuple(None if info is None else info.shape for info in both)
        if None in shapes:
            self.missing.extend(f for f, info in zip(fused, both, strict=True) if info is None)
            return ()
        if shapes not in (straight, swapped):
            info = both[0] if shapes[0] not in (straight[0], swapped[0]) else both[1]
            assert info is not None
            i = both.index(info)
            raise ModelError(
                f"{info.path}: {info.name} has shape {list(info.shape)}, but the configuration "
                f"wants {list(straight[i])}, or {list(swapped[i])} with both tensors of the layer "
                "transposed"
            )
        info = self.take(fused[1 if name == "down" else 0], shapes[1 if name == "down" else 0])
        assert info is not None
        first = n if name == "up" else 0
        if shapes == straight:
            step = 2 * n if name != "down" else n
            return tuple(Piece(info, e * step + first, n) for e in range(experts))
        return tuple(Piece(info, e * k, k, columns=(first, first + n)) for e in range(experts))

    def _fail_missing(self) -> None:
        names = some(self.missing)
        hint = "the download is incomplete, or the configuration is of another model"
        if self.missing == [self.head]:
            hint = "set tie_word_embeddings if the model shares it with the embedding"
        raise ModelError(
            f"{self.path} does not hold {names}, which a {self.config.model_type} model of "
            f"{self.config.num_hidden_layers} layers has; {hint}"
        )

    def _account_for_rest(self) -> None:
        rest = [name for name in self.table if name not in self.used]
        unknown = []
        for name in rest:
            if (GGUF_BUFFERS if self.gguf else HF_BUFFERS).fullmatch(name):
                continue
            if name == self.head:  # then it is tied: it must be the embedding again
                embed = self.table[self.file_name(None, "embed")]
                if same_bytes(self.table[name], embed):
                    continue
                raise ModelError(
                    f"{self.path} holds {name} and {embed.name} with different values, but "
                    "tie_word_embeddings is true; set it to false in config.json if the head is "
                    "its own"
                )
            if "_vl" in self.config.model_type and HF_VISION.fullmatch(name) and not self.gguf:
                self.plan.skipped.append(name)
                continue
            unknown.append(name)
        if unknown:
            raise ModelError(
                f"{self.path} holds {some(unknown)}, which a {self.config.model_type} model of "
                f"{self.config.num_hidden_layers} layers with this configuration does not have; "
                "running it without them would give something else"
            )


def make_plan(config: ModelConfig, table: TensorTable, path: Path, *, gguf: bool = False) -> Plan:
    """What fills what; ModelError for a missing, misshapen or unexplained tensor."""
    return _Planner(config, table, path, gguf).run()


def check_tensor(info: TensorInfo, shape: Sequence[int]) -> None:
    """The shape must be exactly ``shape`` and the dtype one that can be read."""
    if info.shape != tuple(shape):
        raise ModelError(
            f"{info.path}: {info.name} has shape {list(info.shape)}, but the configuration wants "
            f"{list(shape)}; the two are not of the same model"
        )
    if info.decode is None and info.dtype not in PLAIN:
        raise ModelError(
            f"{info.path}: {info.name} has dtype {info.dtype}; {', '.join(PLAIN)} can be read "
            "(weights quantised by other tools are not supported; use the original model)"
        )


def some(names: Iterable[str], limit: int = 3) -> str:
    """The first few names and how many more there are."""
    listed = list(names)
    head = ", ".join(shown(n, 100).strip("'") for n in listed[:limit])
    more = len(listed) - limit
    return f"{head} and {more} more" if more > 0 else head or "no tensors"
