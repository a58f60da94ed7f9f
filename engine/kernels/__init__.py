"""The operations a model is made of. A fast kernel stands beside its plain-torch reference and the
functions exported here choose; models never know which one ran.
"""

from engine.kernels.attention import AttentionPlan, paged_attention, plan_attention
from engine.kernels.reference import gelu_and_mul, layer_norm, rms_norm, rope, silu_and_mul, softcap

__all__ = [
    "AttentionPlan",
    "gelu_and_mul",
    "layer_norm",
    "paged_attention",
    "plan_attention",
    "rms_norm",
    "rope",
    "silu_and_mul",
    "softcap",
]
