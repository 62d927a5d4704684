"""What this library is called."""

NAME = "kagent_kernels"
VERSION = "1.2.0"
NAMESPACE = "kagent_kernels_782036a3"  # of its operators in torch.ops
