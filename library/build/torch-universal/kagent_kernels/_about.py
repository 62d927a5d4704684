"""What this library is called."""

NAME = "kagent_kernels"
VERSION = "1.1.0"
NAMESPACE = "kagent_kernels_a5401f8b"  # of its operators in torch.ops
