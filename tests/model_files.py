"""Small models for the tests: copied, rewritten in other forms, and damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pykestrel.quant import QTensor
from pykestrel.weights import ModelWeights

DATA = Path(__file__).parent / "golden" / "data"
CASES = tuple(sorted(path.parent.name for path in DATA.glob("*/golden.safetensors")))

# dtype, shape, bytes
Tensor = tuple[str, tuple[int, ...], bytes]
ITEM = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I8": 1, "F8_E4M3": 1, "I64": 8}


def copy_model(case: str, to: Path) -> Path:
    """A golden model without its golden logits, to be changed."""
    to.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(DATA / case / name, to / name)
    return to


def edit_config(directory: Path, **changes: Any) -> None:
    """Set keys of config.json; ... removes one."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is ...:
            config.pop(key, None)
        else:
            config[key] = value
    path.write_text(json.dumps(config))


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Name to (dtype, shape, bytes)."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    return {
        name: (e["dtype"], tuple(e["shape"]), raw[slice(*(start + o for o in e["data_offsets"]))])
        for name, e in header.items()
    }


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `read_safetensors`; nothing is checked."""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [at, at + len(data)],
        }
        at += len(data)
    text = json.dumps(header).encode()
    data = b"".join(data for _, _, data in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def edit_tensors(directory: Path, **changes: Tensor | None) -> None:
    """Replace, add or (None) remove tensors of model.safetensors; dots are written as __."""
    path = directory / "model.safetensors"
    tensors = read_safetensors(path)
    for key, tensor in changes.items():
        name = key.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    write_safetensors(path, tensors)


def shard_model(directory: Path, count: int = 3) -> list[Path]:
    """Spread model.safetensors over files with an index."""
    single = directory / "model.safetensors"
    tensors = read_safetensors(single)
    single.unlink()
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    weight_map = {name: names[i % count] for i, name in enumerate(tensors)}
    for shard in names:
        part = {n: t for n, t in tensors.items() if weight_map[n] == shard}
        write_safetensors(directory / shard, part)
    total = sum(len(data) for _, _, data in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return [directory / name for name in names]


def bf16_values(data: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    """float32 values of bf16 bytes."""
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)


def to_f32(tensor: Tensor) -> Tensor:
    """A BF16 tensor as F32."""
    return "F32", tensor[1], bf16_values(tensor[2]).astype("<f4").tobytes()


def same(a: Any, b: Any) -> bool:
    """Whether two weights are equal to the byte."""
    if a is None or b is None:
        return a is b
    if isinstance(a, QTensor) and isinstance(b, QTensor):
        return (
            (a.kind, a.shape) == (b.kind, b.shape)
            and np.array_equal(a.codes, b.codes)
            and np.array_equal(a.scales.view(np.uint16), b.scales.view(np.uint16))
        )
    return a.dtype == b.dtype and np.array_equal(a, b)


def differences(a: ModelWeights, b: ModelWeights) -> list[str]:
    """The names of the weights in which two models differ."""
    names = [n for n in ("embed", "final_norm", "head") if not same(getattr(a, n), getattr(b, n))]
    if len(a.layers) != len(b.layers):
        return [*names, "layers"]
    for i, (x, y) in enumerate(zip(a.layers, b.layers, strict=True)):
        names += [f"{i}.{n}" for n in vars(x) if not same(getattr(x, n), getattr(y, n))]
    return names


# ----- GGUF --------------------------------------------------------------------------------------

GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GGUF_ARCH = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}


def make_gguf(
    case: str,
    path: Path,
    *,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray[Any, Any]] | None = None,
    kind: str = "F32",
    leave_out: str = "\0",
) -> Path:
    """A golden model as the converter of llama.cpp would write it; F32 or Q8_0 matrices.

    ``metadata`` sets or (None) leaves out keys, "{arch}" in them is filled in; values are str,
    bool, int, float or list of str. ``extra`` adds tensors, ``leave_out`` leaves those out whose
    name contains it (but for the extra ones and down_exps).
    """
    import gguf

    config = json.loads((DATA / case / "config.json").read_text())
    arch = GGUF_ARCH[config["model_type"]]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    rope = config.get("rope_parameters") or config
    fields: dict[str, Any] = {
        "{arch}.block_count": config["num_hidden_layers"],
        "{arch}.context_length": config["max_position_embeddings"],
        "{arch}.embedding_length": config["hidden_size"],
        "{arch}.feed_forward_length": config["intermediate_size"],
        "{arch}.attention.head_count": heads,
        "{arch}.attention.head_count_kv": kv,
        "{arch}.attention.key_length": head_dim,
        "{arch}.attention.value_length": head_dim,
        "{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "{arch}.rope.freq_base": rope["rope_theta"],
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(config["vocab_size"])],
    }
    if arch == "qwen3moe":
        fields["{arch}.expert_count"] = config["num_experts"]
        fields["{arch}.expert_used_count"] = config["num_experts_per_tok"]
        fields["{arch}.expert_feed_forward_length"] = config["moe_intermediate_size"]
    fields.update(metadata or {})
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in fields.items():
        key = key.replace("{arch}", arch)
        if value is None:
            continue
        add: Any = {
            str: writer.add_string,
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            list: writer.add_array,
        }[type(value)]
        add(key, value)
    tensors = {
        name: values
        for name, values in gguf_tensors(case, arch, heads, kv).items()
        if leave_out not in name or "down_exps" in name
    }
    tensors.update(extra or {})
    for name, values in tensors.items():
        if kind != "F32" and values.ndim > 1 and values.shape[-1] % 32 == 0:
            quant = gguf.GGMLQuantizationType[kind]
            raw = gguf.quants.quantize(np.ascontiguousarray(values), quant)
            writer.add_tensor(name, raw, raw_dtype=quant)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(
    case: str, arch: str, heads: int, kv: int
) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """The tensors of a golden model under their GGUF names, q and k of llama permuted."""
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    result: dict[str, Any] = {}
    experts: dict[str, dict[int, Any]] = {}
    for name, (_, shape, data) in read_safetensors(DATA / case / "model.safetensors").items():
        values = bf16_values(data).reshape(shape)
        if name in top:
            result[top[name]] = values
            continue
        _, _, layer, rest = name.split(".", 3)
        stem, _, suffix = rest.rpartition(".")
        if stem.startswith("mlp.experts."):
            _, _, number, proj = stem.split(".")
            key = f"blk.{layer}.ffn_{proj.removesuffix('_proj')}_exps.weight"
            experts.setdefault(key, {})[int(number)] = values
            continue
        if arch == "llama" and stem.endswith(("q_proj", "k_proj")):
            n = heads if stem.endswith("q_proj") else kv
            halves = values.reshape(n, 2, shape[0] // n // 2, *shape[1:])
            values = halves.swapaxes(1, 2).reshape(shape)
        result[f"blk.{layer}.{GGUF_NAMES[stem]}.{suffix}"] = values
    for key, by_number in experts.items():
        result[key] = np.stack([by_number[e] for e in range(len(by_number))])
    return result
