"""Rotary embedding settings, in the forms of transformers 4 and 5.

`rope_theta` with `rope_scaling` (`type` or `rope_type`), `rope_parameters` with everything in it,
and `rope_parameters` by layer type all become one `RopeConfig`. What two places say must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..config import RopeConfig
from .fields import Fields

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass
class RopeParser:
    """Reads the rope settings of the object ``f``."""

    f: Fields
    max_positions: int  # max_position_embeddings
    layer_types: Sequence[str]  # empty: all layers have full attention
    mrope: bool  # a vision model: mrope is the plain rotation for text
    default_theta: float | None  # None: a file must state it

    def parse(self) -> RopeConfig:
        f = self.f
        theta = f.optional_number("rope_theta")
        f.get("original_max_position_embeddings")  # looked at where it matters
        found: list[RopeConfig] = []
        for key in ("rope_parameters", "rope_scaling"):
            given = f.mapping(key)
            if not given:
                continue
            if any(isinstance(value, dict) for value in given.values()):
                found.append(self._same_for_all_layers(key, given, theta))
            else:
                found.append(self._one(Fields(given, f"{f.where}, {key}"), theta))
            theta = found[0].rope_theta
        if len(found) == 2 and found[0] != found[1]:
            f.fail(
                "rope_scaling", "it says something else than rope_parameters; remove one of them"
            )
        return found[0] if found else RopeConfig("default", self._theta(theta))

    def _theta(self, theta: float | None) -> float:
        theta = self.default_theta if theta is None else theta
        if theta is None:
            self.f.fail(
                "rope_theta", "the base of the rotary embedding was wanted: no default is safe"
            )
        return theta

    def _same_for_all_layers(
        self, key: str, given: dict[str, Any], theta: float | None
    ) -> RopeConfig:
        """The form by layer type; every type that is used must have the same parameters."""
        sets = []
        for name in sorted(set(self.layer_types) or {"full_attention"}):
            inner = given.get(name)
            if not isinstance(inner, dict):
                self.f.fail(key, f"parameters for {name} were wanted")
            sets.append(self._one(Fields(inner, f"{self.f.where}, {key}.{name}"), theta))
        known = {"full_attention", "sliding_attention"}
        if any(other != sets[0] for other in sets) or not set(given) <= known:
            self.f.fail(key, "one set of parameters for all layers was wanted")
        return sets[0]

    def _one(self, r: Fields, outer_theta: float | None) -> RopeConfig:
        names = [r.get("rope_type"), r.get("type")]
        if self.mrope:
            # The three position ids of a text token are equal, whatever the sections are.
            names = ["default" if name == "mrope" else name for name in names]
            for key in ("mrope_section", "mrope_interleaved"):
                r.get(key)
        given = [name for name in names if name is not None] or ["default"]
        kind = given[0]
        if kind not in ROPE_TYPES or given[-1] != kind:
            key = "rope_type" if r.get("rope_type") is not None else "type"
            wanted = "the same as type" if kind in ROPE_TYPES else f"one of {', '.join(ROPE_TYPES)}"
            r.fail(key, f"{wanted} was wanted")
        theta = r.optional_number("rope_theta")
        if outer_theta is not None and theta is not None and outer_theta != theta:
            r.fail("rope_theta", f"elsewhere it is {outer_theta:g}, and the two must be equal")
        rope = self._of_type(r, kind, self._theta(outer_theta if theta is None else theta))
        r.refuse_unknown(f"rope type {kind}")
        return rope

    def _of_type(self, r: Fields, kind: str, theta: float) -> RopeConfig:
        if kind in ("default", "linear"):
            r.get("original_max_position_embeddings")  # says nothing to these two
        if kind == "default":
            # transformers would ignore a factor here; that is hardly what the author wanted
            if r.get("factor") not in (None, 1):
                r.fail("factor", "the rope type default has none; another rope_type was wanted")
            return RopeConfig("default", theta)
        factor = r.number("factor")
        if kind == "linear":
            return RopeConfig("linear", theta, factor)
        original = self._original_positions(r)
        if kind == "llama3":
            low, high = r.number("low_freq_factor"), r.number("high_freq_factor")
            if high <= low:
                r.fail("high_freq_factor", f"more than low_freq_factor = {low:g} was wanted")
            if original is None:
                r.fail("original_max_position_embeddings", "the context of the training was wanted")
            return RopeConfig("llama3", theta, factor, original, low, high)
        fast, slow = r.number("beta_fast", 32.0), r.number("beta_slow", 1.0)
        if fast < slow:
            r.fail("beta_fast", f"at least beta_slow = {slow:g} was wanted")
        if theta <= 1.0:  # its logarithm is a divisor
            at = r if r.get("rope_theta") is not None else self.f
            at.fail("rope_theta", "yarn wants more than 1")
        return RopeConfig(
            "yarn",
            theta,
            factor,
            # without it transformers takes the length of the context as it is configured
            self.max_positions if original is None else original,
            attention_factor=r.optional_number("attention_factor"),
            beta_fast=fast,
            beta_slow=slow,
            mscale=r.optional_number("mscale"),
            mscale_all_dim=r.optional_number("mscale_all_dim"),
            truncate=r.boolean("truncate", True),
        )

    def _original_positions(self, r: Fields) -> int | None:
        """It may stand among the rope settings, beside them (Phi's way), or, as transformers 5
        saves such a file, in both places."""
        key = "original_max_position_embeddings"
        given = [fields.integer(key) for fields in (r, self.f) if fields.get(key) is not None]
        if len(set(given)) == 2:
            r.fail(key, f"beside the rope settings it is {given[1]}, and the two must be equal")
        return given[0] if given else None
