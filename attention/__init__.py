"""Who may look at whom, and what is remembered: masks, caches, reads and rotary positions."""

from .caches import CacheRows, KVCache, RotatingKVCache
from .masks import MaskMemo
from .packing import PackedRows, Packing
from .reads import AttentionRead, StepwiseRead
from .rope import Rotary

__all__ = ["AttentionRead", "CacheRows", "KVCache", "MaskMemo", "PackedRows", "Packing", "RotatingKVCache", "Rotary", "StepwiseRead"]
