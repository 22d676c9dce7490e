"""The CPU engine: pure Python over NumPy. How it is laid out, and why: docs/cpu-engine.md."""

from .engine import CpuEngine
from .memory import available_memory, check_memory, memory_needed
from .store import Store

__all__ = ["CpuEngine", "Store", "available_memory", "check_memory", "memory_needed"]
