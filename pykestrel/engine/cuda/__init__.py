"""The engine on one NVIDIA GPU: weights, K/V and every step on the device, through libvcuda."""

from .engine import CudaEngine
from .plan import Need, SmallWeights, decode_config, device_need, entries, place
from .rows import stored_rows

__all__ = [
    "CudaEngine",
    "Need",
    "SmallWeights",
    "decode_config",
    "device_need",
    "entries",
    "place",
    "stored_rows",
]
