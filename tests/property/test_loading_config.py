"""config.json: what is understood, what is refused, and that nothing else can happen."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_files import CASES, DATA

from pykestrel.config import ModelConfig, RopeConfig
from pykestrel.errors import KestrelError, ModelError
from pykestrel.loading.jsonfile import parse_json, read_json_object

CONFIGS = {case: json.loads((DATA / case / "config.json").read_text()) for case in CASES}


def parse(case: str, **changes: Any) -> ModelConfig:
    d = copy.deepcopy(CONFIGS[case])
    where = d["text_config"] if "text_config" in d and "model_type" not in changes else d
    for key, value in changes.items():
        if value is ...:
            where.pop(key, None)
        else:
            where[key] = value
    return ModelConfig.from_dict(d, "config.json")


def refusal(case: str, **changes: Any) -> str:
    with pytest.raises(ModelError) as caught:
        parse(case, **changes)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ----- rope --------------------------------------------------------------------------------------


def test_old_and_new_rope_forms_agree() -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 128}
    old = parse(
        "qwen3-tied", rope_theta=1e6, rope_scaling={"type": "yarn", **yarn}, rope_parameters=...
    )
    new = parse(
        "qwen3-tied",
        rope_theta=...,
        rope_scaling=...,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, **yarn},
    )
    assert old.rope == new.rope == RopeConfig("yarn", 1e6, 4.0, 128)


def test_yarn_takes_all_its_settings() -> None:
    rope = parse(
        "qwen2",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 5e5,
            "factor": 2,
            "attention_factor": 1.5,
            "beta_fast": 16,
            "beta_slow": 2,
            "mscale": 0.7,
            "mscale_all_dim": 0.9,
            "truncate": False,
        },
    ).rope
    # without an original length the configured one counts
    assert rope == RopeConfig("yarn", 5e5, 2.0, 512, None, None, 1.5, 16.0, 2.0, 0.7, 0.9, False)


def test_llama3_rope() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    rope = parse("llama-gqa3", rope_parameters=..., rope_theta=5e5, rope_scaling=scaling).rope
    assert rope == RopeConfig("llama3", 5e5, 8.0, 256, 1.0, 4.0)
    for key in ("factor", "low_freq_factor", "high_freq_factor"):
        broken = {k: v for k, v in scaling.items() if k != key}
        assert key in refusal(
            "llama-gqa3", rope_parameters=..., rope_theta=5e5, rope_scaling=broken
        )


def test_the_original_context_may_stand_beside_the_rope_settings() -> None:
    key = "original_max_position_embeddings"
    inner = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}
    beside = parse("qwen3-tied", rope_parameters=inner, **{key: 64})
    assert beside.rope.original_max_position_embeddings == 64
    # transformers 5 reads the first form and saves the second
    assert parse("qwen3-tied", rope_parameters={**inner, key: 64}, **{key: 64}) == beside
    message = refusal("qwen3-tied", rope_parameters={**inner, key: 64}, **{key: 32})
    assert f"{key} is 64; beside the rope settings it is 32" in message
    assert parse("qwen3-tied", **{key: 64}) == parse("qwen3-tied")  # says nothing without scaling
    assert parse("llama-gqa3", rope_parameters=..., **{key: 64}).rope.rope_type == "default"


def test_a_theta_that_yarn_cannot_use_is_named() -> None:
    message = refusal(
        "qwen3-tied",
        rope_parameters=...,
        rope_theta=1.0,
        rope_scaling={"type": "yarn", "factor": 4.0},
    )
    assert "rope_theta is 1.0; yarn wants more than 1" in message


def test_a_missing_theta_is_only_filled_in_for_llama() -> None:
    assert parse("llama-gqa3", rope_parameters=...).rope == RopeConfig("default", 10000.0)
    for case in CASES:
        if CONFIGS[case]["model_type"] != "llama":
            message = refusal(case, rope_parameters=..., rope_theta=...)
            assert "rope_theta is missing" in message


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "ntk", "su", "proportional", "mrope", 3])
def test_other_rope_types_are_refused_by_name(kind: Any) -> None:
    message = refusal(
        "qwen3-untied", rope_parameters={"rope_type": kind, "rope_theta": 1e6, "factor": 2.0}
    )
    assert repr(kind) in message
    assert "default, linear, llama3, yarn" in message


def test_rope_that_says_two_things_is_refused() -> None:
    parameters = {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}
    assert "rope_scaling" in refusal(
        "qwen3-untied", rope_parameters=parameters, rope_scaling={"type": "linear", "factor": 4.0}
    )
    assert "rope_theta" in refusal("qwen3-untied", rope_parameters=parameters, rope_theta=1e4)
    assert "type" in refusal("qwen3-untied", rope_parameters={**parameters, "type": "yarn"})
    # a factor that the type would ignore
    assert "factor" in refusal(
        "qwen3-untied", rope_parameters={**parameters, "rope_type": "default"}
    )
    assert "partial_rotary_factor" in refusal(
        "qwen3-untied", rope_parameters={**parameters, "partial_rotary_factor": 0.5}
    )


def test_rope_of_layer_types_must_be_one() -> None:
    one = {"rope_type": "default", "rope_theta": 1e6}
    other = {"rope_type": "default", "rope_theta": 1e4}
    nested = {"full_attention": one}
    assert parse("qwen3-untied", rope_parameters=nested).rope == RopeConfig("default", 1e6)
    sliding = {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": 8,
    }
    same = {"full_attention": one, "sliding_attention": one}
    assert parse("qwen3-untied", rope_parameters=same, **sliding).rope.rope_theta == 1e6
    differ = {"full_attention": one, "sliding_attention": other}
    assert "rope_parameters" in refusal("qwen3-untied", rope_parameters=differ, **sliding)


# ----- windows, experts, ties --------------------------------------------------------------------


def test_sliding_windows_are_those_of_transformers() -> None:
    off = {"sliding_window": 16, "use_sliding_window": False}
    assert parse("qwen2", **off).layer_window == (None, None, None)
    on = {"sliding_window": 16, "use_sliding_window": True, "layer_types": ...}
    assert parse("qwen2", **on).layer_window == (None, None, None)  # max_window_layers is 28
    assert parse("qwen2", **on, max_window_layers=1).layer_window == (None, 16, 16)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert parse("qwen3-tied", **{**on, "layer_types": types}).layer_window == (16, None, 16)
    assert parse("qwen3-moe", **on, max_window_layers=2).layer_window == (16, 16, 16)
    assert "use_sliding_window" in refusal("llama-gqa3", **on)
    assert "layer_types" in refusal("qwen2", layer_types=types)
    assert "layer_types" in refusal("qwen2", layer_types=types[:2])
    assert "chunked_attention" in refusal("qwen2", layer_types=["chunked_attention"] * 3)


def test_which_layers_have_experts() -> None:
    assert parse("qwen3-moe").layer_is_moe == (True, True, True)
    assert parse("qwen3-moe", mlp_only_layers=[1]).layer_is_moe == (True, False, True)
    assert parse("qwen3-moe", decoder_sparse_step=2).layer_is_moe == (False, True, False)
    assert parse("qwen3-moe", num_experts=0).num_experts == 0
    renamed = parse("qwen3-moe", num_experts=..., num_local_experts=8)
    assert renamed == parse("qwen3-moe")
    assert parse("qwen3-moe", norm_topk_prob=...).norm_topk_prob is False
    assert "num_local_experts" in refusal("qwen3-moe", num_local_experts=4)
    assert "num_experts_per_tok" in refusal("qwen3-moe", num_experts_per_tok=9)
    assert "mlp_only_layers" in refusal("qwen3-moe", mlp_only_layers=[3])


def test_head_dim_is_used_when_given() -> None:
    assert parse("qwen3-tied").head_dim == 32  # hidden_size / heads would be 16
    assert parse("qwen2").head_dim == 16
    # without it 128 where the classes of transformers say so, whatever hidden_size / heads is
    for case, want in (("qwen3-tied", 128), ("qwen3-vl-text", 128), ("qwen3-moe", 16)):
        assert parse(case, head_dim=...).head_dim == want
    assert "head_dim" in refusal("qwen3-tied", head_dim=31)
    assert "head_dim" in refusal("qwen2", num_attention_heads=6)


def test_the_outer_tie_counts() -> None:
    d = copy.deepcopy(CONFIGS["qwen3-vl-text"])
    d["tie_word_embeddings"] = False
    assert ModelConfig.from_dict(d, "c").tie_word_embeddings is False
    del d["tie_word_embeddings"]
    assert ModelConfig.from_dict(d, "c").tie_word_embeddings is True


def test_end_ids_are_an_int_or_a_list() -> None:
    assert parse("qwen2", eos_token_id=[5, 1, 5]).eos_token_ids == (5, 1)
    assert parse("qwen2", eos_token_id=None).eos_token_ids == ()
    assert "eos_token_id" in refusal("qwen2", eos_token_id="</s>")
    assert "eos_token_id" in refusal("qwen2", eos_token_id=[1, True])


# ----- refusals ----------------------------------------------------------------------------------


def test_an_unknown_model_type_lists_the_known_ones() -> None:
    for kind in ("gpt2", "mistral", None, 3, ["qwen3"]):
        message = refusal("qwen2", model_type=kind)
        assert "llama, qwen2, qwen3, qwen3_moe, qwen3_vl, qwen3_vl_moe" in message


@pytest.mark.parametrize("method", ["fp8", "gptq", "awq", "bitsandbytes", "compressed-tensors"])
def test_foreign_quantisation_is_refused_by_name(method: str) -> None:
    assert repr(method) in refusal("qwen2", quantization_config={"quant_method": method})
    d = copy.deepcopy(CONFIGS["qwen3-vl-text"])
    d["text_config"]["quantization_config"] = {"quant_method": method}
    with pytest.raises(ModelError, match=method):
        ModelConfig.from_dict(d, "c")
    assert "bits" in refusal("qwen2", quantization={"bits": 4, "group_size": 64})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("attention_sink", True),
        ("partial_rotary_factor", 0.5),
        ("embedding_multiplier", 12.0),
        ("residual_multiplier", 0.22),
        ("attention_multiplier", 0.015625),
        ("logits_scaling", 8.0),
        ("logit_scale", 0.0625),
        ("no_rope_layers", [1, 0, 1]),
        ("use_qk_norm", True),
        ("num_experts", 8),
        ("shared_expert_intermediate_size", 96),
        ("hidden_act", "gelu"),
        ("is_encoder_decoder", True),
        ("some_new_trick", "clever"),
        ("is_causal", False),
        ("architectures", ["LlamaForSequenceClassification"]),
    ],
)
def test_settings_that_change_the_arithmetic_are_refused_by_name(key: str, value: Any) -> None:
    assert key in refusal("llama-gqa3", **{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_logit_softcapping", None),
        ("partial_rotary_factor", 1.0),
        ("logits_scaling", 1),
        ("no_rope_layers", []),
        ("some_new_trick", False),
        ("shared_expert_intermediate_size", 0),
        ("pretraining_tp", 2),
        ("_name_or_path", "x/y"),
        ("unsloth_version", "2026.1"),
        ("sep_token_id", 3),
        ("hidden_act", "swish"),
        ("use_qk_norm", False),
    ],
)
def test_settings_that_change_nothing_are_accepted(key: str, value: Any) -> None:
    assert parse("llama-gqa3", **{key: value}) == parse("llama-gqa3")


SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "intermediate_size",
    "max_position_embeddings",
)


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize(
    "value", ["64", 64.0, True, -1, 0, 10**12, 10**400, [64], {}, float("nan"), float("inf")]
)
def test_sizes_are_integers_within_reason(key: str, value: Any) -> None:
    if (key, value) == ("intermediate_size", 0):
        return
    assert key in refusal("qwen2", **{key: value})


@pytest.mark.parametrize("key", [k for k in SIZES if k != "num_key_value_heads"])
def test_sizes_must_be_stated(key: str) -> None:
    assert f"{key} is missing" in refusal("llama-gqa3", **{key: ...})


ANY_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["yarn", "linear", "llama3", "full_attention", 1, 2, 0.5]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["rope_type", "type", "factor", "rope_theta", "beta_fast", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@given(case=st.sampled_from(CASES), data=st.data())
def test_any_config_is_understood_or_refused(case: str, data: st.DataObject) -> None:
    d = copy.deepcopy(CONFIGS[case])
    where = d.get("text_config", d)
    keys = [*where, "rope_scaling", "sliding_window", "use_sliding_window", "num_local_experts"]
    for key in data.draw(st.lists(st.sampled_from(keys), max_size=3)):
        where[key] = data.draw(ANY_JSON)
    message = ""
    try:
        config = ModelConfig.from_dict(d, "config.json")
    except KestrelError as error:
        message = str(error)
    if message:
        assert message.isprintable()
        assert len(message) < 1000
        return
    assert len(config.layer_window) == len(config.layer_is_moe) == config.num_hidden_layers
    assert config.num_attention_heads % config.num_key_value_heads == 0
    assert config.head_dim % 2 == 0
    assert config.rope.rope_theta > 0
    assert config.rope.factor > 0
    assert config.rms_norm_eps > 0


# ----- JSON --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "empty"),
        ("  \n", "empty"),
        ("{", "not valid JSON"),
        ("[1]", "list"),
        ("3", "number"),
        ('"x"', "string"),
        ("null", "null"),
        ('{"a": 1, "a": 2}', "twice"),
        ('{"a": NaN}', "NaN"),
        ('{"a": -Infinity}', "Infinity"),
        ('{"a": ' + "9" * 5000 + "}", "number"),
        ("[" * 100_000, "nested"),
        ('{"a":' * 100_000, "nested"),
    ],
)
def test_bad_json_is_one_clear_error(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelError, match=word) as caught:
        read_json_object(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 500


def test_json_bytes(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json_object(path) == {"a": 1}
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ModelError, match="UTF-8"):
        read_json_object(path)
    with open(path, "wb") as file:
        file.truncate(100 << 20)
    with pytest.raises(ModelError, match="104857600 bytes"):
        read_json_object(path, 8 << 20)


@given(st.text(max_size=60))
def test_any_text_is_json_or_refused(text: str) -> None:
    message = "x.json "
    try:
        parse_json(text, "x.json")
    except KestrelError as error:
        message = str(error)
    assert message.startswith("x.json ")
