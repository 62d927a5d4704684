"""What this library is called."""

NAME = "kagent_kernels"
VERSION = "1.5.3"
NAMESPACE = "kagent_kernels_a1f23a38"  # of its operators in torch.ops
