"""Layers for Hugging Face `kernels`: stateless, each with the forward of what it replaces."""

from .operators import adamw as _adamw
from .operators import attention as _attention
from .operators import attention_backward as _attention_backward
from .operators import attention_train as _attention_train
from .operators import cross_entropy as _cross_entropy
from .operators import fp8_linear as _fp8_linear
from .operators import gelu as _gelu
from .operators import gelu_backward as _gelu_backward
from .operators import int8_linear as _int8_linear
from .operators import linear_cross_entropy as _linear_cross_entropy
from .operators import rms_norm_backward as _rms_norm_backward
from .operators import softmax as _softmax
from .operators import softmax_backward as _softmax_backward

Adamw = _adamw.LAYERS["Adamw"]
Attention = _attention.LAYERS["Attention"]
ScaledDotProductAttention = _attention.LAYERS["ScaledDotProductAttention"]
AttentionBackward = _attention_backward.LAYERS["AttentionBackward"]
AttentionTrain = _attention_train.LAYERS["AttentionTrain"]
CrossEntropyLoss = _cross_entropy.LAYERS["CrossEntropyLoss"]
Fp8Linear = _fp8_linear.LAYERS["Fp8Linear"]
GELU = _gelu.LAYERS["GELU"]
GeluTanh = _gelu.LAYERS["GeluTanh"]
NewGELU = _gelu.LAYERS["NewGELU"]
GeluBackward = _gelu_backward.LAYERS["GeluBackward"]
Int8Linear = _int8_linear.LAYERS["Int8Linear"]
FusedLinearCrossEntropyLoss = _linear_cross_entropy.LAYERS["FusedLinearCrossEntropyLoss"]
RmsNormBackward = _rms_norm_backward.LAYERS["RmsNormBackward"]
Softmax = _softmax.LAYERS["Softmax"]
SoftmaxBackward = _softmax_backward.LAYERS["SoftmaxBackward"]

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
    "GeluTanh",
    "Int8Linear",
    "NewGELU",
    "RmsNormBackward",
    "ScaledDotProductAttention",
    "Softmax",
    "SoftmaxBackward",
]
