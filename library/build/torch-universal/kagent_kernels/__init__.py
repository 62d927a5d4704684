"""Kernels for PyTorch: measured where they are used, and torch itself everywhere else.

Written by kagent 0.1.0; CARD.md has the figures, PROVENANCE.json where they come from.
"""

from . import layers
from ._about import VERSION as __version__
from .operators.adamw import Adamw, adamw
from .operators.adamw_tensors import adamw_tensors, fused_adamw
from .operators.attention import Attention, attention
from .operators.attention_backward import AttentionBackward, attention_backward
from .operators.attention_train import AttentionTrain, attention_train
from .operators.cross_entropy import CrossEntropyLoss, cross_entropy
from .operators.fp8_linear import Fp8Linear, fp8_linear
from .operators.gelu import GELU, gelu
from .operators.gelu_backward import GeluBackward, gelu_backward
from .operators.int8_linear import Int8Linear, int8_linear
from .operators.linear_cross_entropy import FusedLinearCrossEntropyLoss, linear_cross_entropy
from .operators.rms_norm_backward import RmsNormBackward, rms_norm_backward
from .operators.softmax import Softmax, softmax
from .operators.softmax_backward import SoftmaxBackward, softmax_backward

__all__ = [
    "Adamw",
    "Attention",
    "AttentionBackward",
    "AttentionTrain",
    "CrossEntropyLoss",
    "Fp8Linear",
    "FusedLinearCrossEntropyLoss",
    "GELU",
    "GeluBackward",
    "Int8Linear",
    "RmsNormBackward",
    "Softmax",
    "SoftmaxBackward",
    "__version__",
    "adamw",
    "adamw_tensors",
    "attention",
    "attention_backward",
    "attention_train",
    "cross_entropy",
    "fp8_linear",
    "fused_adamw",
    "gelu",
    "gelu_backward",
    "int8_linear",
    "layers",
    "linear_cross_entropy",
    "rms_norm_backward",
    "softmax",
    "softmax_backward",
]
