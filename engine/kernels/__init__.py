"""The operations a model is made of. A fast kernel stands beside its plain-torch reference and the
functions exported here choose; models never know which one ran.
"""

from engine.kernels.paged_attention import AttentionPlan, paged_attention, plan_attention
from engine.kernels.reference import rms_norm, rope, silu_and_mul

__all__ = [
    "AttentionPlan",
    "paged_attention",
    "plan_attention",
    "rms_norm",
    "rope",
    "silu_and_mul",
]
