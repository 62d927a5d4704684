"""What this library is called."""

NAME = "kagent_kernels"
VERSION = "1.0.0"
NAMESPACE = "kagent_kernels_f2ce0fcb"  # of its operators in torch.ops
