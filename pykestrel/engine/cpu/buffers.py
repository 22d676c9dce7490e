"""Where the CPU engine's pass over some tokens writes."""

from __future__ import annotations

from ...config import ModelConfig
from .workers import Scratch


class Buffers:
    """Every array that a pass over M rows writes, allocated once."""

    def __init__(self, config: ModelConfig, scratch: Scratch, rows: int) -> None:
        c, m = config, rows
        heads, kv_heads, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.rows = m
        self.x = scratch.get("x", m, c.hidden_size)  # the residual stream
        self.normed = scratch.get("normed", m, c.hidden_size)
        self.delta = scratch.get("delta", m, c.hidden_size)  # what a block adds to x
        self.qkv = scratch.get("qkv", m, c.q_dim + 2 * c.kv_dim)
        all_heads = self.qkv.reshape(m, heads + 2 * kv_heads, dim)
        self.qk_heads = all_heads[:, : heads + kv_heads]
        self.q = all_heads[:, :heads].reshape(m, kv_heads, heads // kv_heads, dim)
        self.kv = all_heads[:, heads:].reshape(m, 2, kv_heads, dim)
        self.qk_halves = self.qk_heads.reshape(m, heads + kv_heads, 2, dim // 2)
        spare = scratch.get("spare", m, heads + 2 * kv_heads, dim)
        self.qk_spare = spare[:, : heads + kv_heads]
        self.halves_spare = self.qk_spare.reshape(self.qk_halves.shape)
        self.kv_spare = spare[:, heads:].reshape(m, 2, kv_heads, dim)
        self.attended = scratch.get("attended", m, c.q_dim)
        self.attended_heads = self.attended.reshape(m, kv_heads, heads // kv_heads, dim)
        dense = c.intermediate_size if not all(c.layer_is_moe) else 0
        self.gate_up = scratch.get("gate_up", m, 2 * dense)
        self.gate, self.up = self.gate_up[:, :dense], self.gate_up[:, dense:]
        self.hidden = scratch.get("hidden", m, dense)
