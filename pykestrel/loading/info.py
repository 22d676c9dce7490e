"""What a model is made of, without loading it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import ModelConfig
from ..errors import ModelError
from .families import make_plan
from .load import QUANTS, read_config, read_tensors, target_bytes
from .quantized import quantized_plan, stored_quant
from .source import Source


@dataclass(frozen=True)
class ModelInfo:
    """What `pykestrel info` tells."""

    name: str
    path: Path
    kind: str  # "dir" | "gguf"
    config: ModelConfig
    parameters: int  # weights of the model that runs; a tied head counts once
    tensors: int  # in the files
    dtypes: dict[str, tuple[int, int]]  # dtype of the files: (tensors, bytes)
    file_bytes: int  # of the files that hold the tensors
    weight_bytes: dict[str, int]  # memory for the weights as "bf16", "q8", "q4"
    stored_quant: str | None  # kind of a directory that `pykestrel quantize` wrote
    skipped: list[str]  # tensors of parts that are not run (visual.*)
    notes: list[str]  # what a user should know, one sentence each


def describe(source: Source) -> ModelInfo:
    """Read the headers, check them like `load_weights`, and count."""
    config = read_config(source)
    table = read_tensors(source)
    stored = stored_quant(source)
    notes = []
    if stored is not None:
        plan = quantized_plan(config, table, source.path, stored.kind)[0]
        notes.append(f"quantised by pykestrel as {stored.kind}; loads without quantising")
    else:
        plan = make_plan(config, table, source.path, gguf=source.kind == "gguf")
    if plan.skipped:
        notes.append(f"{len(plan.skipped)} tensors of the vision tower are skipped: only text runs")
    if not _states_theta(source):
        notes.append(
            f"no rope_theta is stated; {config.rope.rope_theta:g}, the default of "
            f"{config.model_type}, is used"
        )
    dtypes: dict[str, tuple[int, int]] = {}
    for info in table.values():
        count, size = dtypes.get(info.dtype, (0, 0))
        dtypes[info.dtype] = (count + 1, size + info.nbytes)
    return ModelInfo(
        name=source.name,
        path=source.path,
        kind=source.kind,
        config=config,
        parameters=sum(_size(t.shape) for t in plan.targets),
        tensors=len(table),
        dtypes=dict(sorted(dtypes.items())),
        file_bytes=sum(p.stat().st_size for p in {i.path for i in table.values()}),
        weight_bytes={q: sum(target_bytes(t, q) for t in plan.targets) for q in QUANTS},
        stored_quant=None if stored is None else stored.kind,
        skipped=plan.skipped,
        notes=notes,
    )


def _size(shape: tuple[int, ...]) -> int:
    n = 1
    for extent in shape:
        n *= extent
    return n


def _states_theta(source: Source) -> bool:
    """Whether the file itself says the base of the rotary embedding."""
    d: Any = source.gguf().config_dict if source.kind == "gguf" else source.read_json("config.json")
    text = d.get("text_config") or d
    groups = [text, text.get("rope_parameters"), text.get("rope_scaling")]
    nested = [v for g in groups[1:] if isinstance(g, dict) for v in g.values()]
    return any(isinstance(g, dict) and g.get("rope_theta") is not None for g in groups + nested)


def read_generation_config(source: Source) -> dict[str, Any]:
    """The keys that the model's generation_config.json states (null counts as not stated)."""
    if source.kind == "gguf":
        return {}
    config = source.read_json("generation_config.json") or {}
    value = config.get("eos_token_id")
    if value is not None:
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int and i >= 0 for i in ids):
            raise ModelError(
                f"{source.path / 'generation_config.json'}: eos_token_id must be a token id or a "
                "list of token ids"
            )
    return {key: value for key, value in config.items() if value is not None}
