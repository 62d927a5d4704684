"""What this library is called."""

NAME = "kagent_kernels"
VERSION = "1.5.1"
NAMESPACE = "kagent_kernels_e9cc35f7"  # of its operators in torch.ops
