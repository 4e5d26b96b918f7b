"""Who may look at whom, and what is remembered: masks, caches, reads and rotary positions."""

from .caches import CacheRows, KVCache, RotatingKVCache
from .masks import MaskMemo
from .reads import AttentionRead, StepwiseRead
from .rope import Rotary

__all__ = ["AttentionRead", "CacheRows", "KVCache", "MaskMemo", "RotatingKVCache", "Rotary", "StepwiseRead"]
