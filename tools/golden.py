#!/usr/bin/env python3
"""Make the golden cases of tests/golden/data whose names end in "": options that transformers
has and that the six plain cases do not turn on.

    pip install torch==2.13.0 transformers==5.24.0
    python3 tools/golden.py [CASE...]

Neither package is needed to run the tests. A case is a directory with config.json, the random
bf16 weights as `save_pretrained` writes them, and golden.safetensors: ``input_ids`` int64 [24],
``logits`` float32 [24, V] of one pass in float32 over the bf16 weights, and ``greedy`` int64 [24].
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent.parent / "tests" / "golden" / "data"
TOKENS = 24

BASE: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# As Qwen3-VL's files say it; the text tower alone runs, so the vision tower is a stub.
VISION = {
    "deepstack_visual_indexes": [0],
    "depth": 1,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 8,
    "in_channels": 3,
    "intermediate_size": 8,
    "num_heads": 1,
    "num_position_embeddings": 4,
    "out_hidden_size": 40,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def flat(model_type: str, architecture: str, **changes: Any) -> dict[str, Any]:
    return {**BASE, "model_type": model_type, "architectures": [architecture], **changes}


CASES: dict[str, dict[str, Any]] = {
    # every bias, an odd head_dim, yarn in the form of transformers 4; the small theta puts the
    # ramp from dimension 4 to 6 of 10, so that each setting shows
    "llama-yarn": flat(
        "llama",
        "LlamaForCausalLM",
        rope_theta=50.0,
        head_dim=20,
        attention_bias=True,
        mlp_bias=True,
        rope_scaling={
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 2.0,
        },
    ),
    "llama-llama3": flat(
        "llama",
        "LlamaForCausalLM",
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    # the first layer sees everything, the others 7 positions
    "qwen2-window": flat(
        "qwen2",
        "Qwen2ForCausalLM",
        rope_theta=1e6,
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=1,
    ),
    # a dense layer between layers of experts, weights of experts as the softmax gave them
    "qwen3-moe-mixed": flat(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        rope_theta=1e6,
        head_dim=16,
        attention_bias=True,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=False,
        mlp_only_layers=[1],
        use_sliding_window=True,
        sliding_window=9,
    ),
    # experts fused in 3-D tensors
    "qwen3-vl-moe": {
        "model_type": "qwen3_vl_moe",
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "text_config": {
            **BASE,
            "model_type": "qwen3_vl_moe_text",
            "head_dim": 16,
            "rope_theta": 5e6,
            "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]},
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "decoder_sparse_step": 2,
        },
        "vision_config": VISION,
        "image_token_id": 0,
        "video_token_id": 0,
        "vision_start_token_id": 0,
        "vision_end_token_id": 0,
        "tie_word_embeddings": False,
    },
}


def make(name: str, config: dict[str, Any], directory: Path) -> float:
    """Write one case; returns the standard deviation of its logits."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    save_file: Any = importlib.import_module("safetensors.torch").save_file
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    vision = "vision_config" in config
    auto = transformers.AutoModelForImageTextToText if vision else transformers.AutoModelForCausalLM
    read = transformers.AutoConfig.from_pretrained(directory)
    torch.manual_seed(sum(map(ord, name)))
    model = auto.from_config(read, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            noise = torch.randn_like(p)
            if p.ndim == 1:
                p.copy_(1 + 0.2 * noise if "norm" in key else 0.3 * noise)
            else:
                top = "embed_tokens" in key or "lm_head" in key
                p.copy_(noise * (1.4 if top else 1.3 / p.shape[-1] ** 0.5))
            p.copy_(p.bfloat16().float())
        ids = torch.randint(2, 128, (TOKENS,))
        logits = model(input_ids=ids[None]).logits[0]
        sequence = ids
        for _ in range(TOKENS):
            best = model(input_ids=sequence[None]).logits[0, -1].argmax()
            sequence = torch.cat([sequence, best[None]])
    with tempfile.TemporaryDirectory() as saved:
        # a copy: .bfloat16() would round the rotary frequencies of this one too
        copy.deepcopy(model).bfloat16().save_pretrained(saved)
        (directory / "model.safetensors").write_bytes(
            (Path(saved) / "model.safetensors").read_bytes()
        )
    golden = {"input_ids": ids, "logits": logits.contiguous(), "greedy": sequence[TOKENS:].clone()}
    save_file(golden, directory / "golden.safetensors")
    return float(logits.std())


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in sys.argv[1:] or CASES:
        print(f"{name}: logits have a standard deviation of {make(name, CASES[name], DATA / name)}")


if __name__ == "__main__":
    main()
