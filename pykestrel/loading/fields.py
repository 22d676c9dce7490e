"""Typed and bounded access to the settings of one JSON object.

It remembers which settings were understood, so that the rest can be refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from ..errors import ModelError
from .jsonfile import shown

# Keys that say nothing about the forward pass of a trained model.
_HARMLESS_WORDS = """
    architectures auto_map model_type transformers_version torch_dtype dtype name_or_path
    use_cache initializer_range initializer_factor output_router_logits router_aux_loss_coef
    router_z_loss_coef pretraining_tp attn_implementation use_flash_attn use_flash_attention_2
    is_decoder torchscript use_bfloat16 tf_legacy_loss return_dict output_hidden_states
    output_attentions chunk_size_feed_forward tie_encoder_decoder finetuning_task id2label label2id
    num_labels tokenizer_class prefix task_specific_params problem_type max_length min_length
    do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens license language tags model_name unsloth_fixed padding_side
    gradient_checkpointing vision_config transformers.js_config is_llama_config
    max_sequence_length model_max_length seq_length max_seq_len cache_implementation loss_type
    keys_to_ignore_at_inference neftune_noise_alpha
"""
_HARMLESS = frozenset(_HARMLESS_WORDS.split())
_HARMLESS_ENDS = ("_token_id", "_token_ids", "_token_index", "_version", "dropout", "_pdrop")
_ALWAYS_ON = ("is_causal", "causal", "use_rope", "use_causal_mask")
# 1 is the value of these that leaves the arithmetic alone; of other unknown keys 0 or "off" is.
_SCALE_ENDS = ("multiplier", "scale", "scaling", "factor")

LIMITS = {  # far above any model; below it no product of two sizes leaves an int64
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "moe_intermediate_size": 1 << 24,
    "num_hidden_layers": 10_000,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 14,
    "vocab_size": 1 << 26,
    "max_position_embeddings": 1 << 31,
    "num_experts": 1 << 16,
}
_LARGE = 1 << 31


class Fields:
    """Typed, bounded access to one JSON object that remembers which keys were understood."""

    def __init__(self, d: Mapping[str, Any], where: str) -> None:
        self.d, self.where = d, where
        self.used: set[str] = set()

    def fail(self, key: str, wanted: str) -> NoReturn:
        got = f"is {shown(self.d[key])}" if self.d.get(key) is not None else "is missing"
        raise ModelError(f"{self.where}: {key} {got}; {wanted}")

    def get(self, key: str) -> Any:
        """The raw value; null counts as missing."""
        self.used.add(key)
        return self.d.get(key)

    def integer(
        self, key: str, default: int | None = None, lo: int = 1, hi: int | None = None
    ) -> int:
        hi = LIMITS.get(key, _LARGE) if hi is None else hi
        value = self.get(key)
        if value is None and default is not None:
            return default
        # 8.0 is refused like "8": a file that is careless with types is no config.json of ours
        if type(value) is not int or not lo <= value <= hi:
            self.fail(key, f"an integer from {lo} to {hi} was wanted")
        return value

    def number(self, key: str, default: float | None = None, lo: float = 0.0) -> float:
        """A finite number greater than ``lo``."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        # compared as it is: float() of an int of 400 digits would raise
        if type(value) not in (int, float) or not lo < value < 1e30:
            self.fail(key, f"a number greater than {lo:g} was wanted")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            self.fail(key, "true or false was wanted")
        return value

    def mapping(self, key: str) -> dict[str, Any] | None:
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            self.fail(key, "an object was wanted")
        return value

    def sequence(self, key: str) -> list[Any] | None:
        value = self.get(key)
        if value is not None and not isinstance(value, list):
            self.fail(key, "a list was wanted")
        return value

    def refuse_unknown(self, model_type: str) -> None:
        """Refuse every key that was not understood, is not harmless and is not switched off."""
        for key, value in self.d.items():
            if key in self.used or key in _HARMLESS or key.startswith("_"):
                continue
            if key.endswith(_HARMLESS_ENDS):
                continue
            # what every model here does: to switch it off would change it, not to switch it on
            off = (value is None or value is True) if key in _ALWAYS_ON else _is_off(key, value)
            if off:
                continue
            raise ModelError(
                f"{self.where}: {shown(key)} is {shown(value)}, a setting that pykestrel does not "
                f"know for {model_type} and that may change what the model computes; if it does "
                "not, remove it from the file"
            )


def _is_off(key: str, value: object) -> bool:
    if value is None or value is False or value in ("", [], {}, "none", "default"):
        return True
    if type(value) in (int, float):
        return value == (1 if key.endswith(_SCALE_ENDS) else 0)
    return False
