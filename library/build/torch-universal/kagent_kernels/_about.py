"""What this library is called."""

NAME = "kagent_kernels"
VERSION = "1.3.0"
NAMESPACE = "kagent_kernels_c7af74ba"  # of its operators in torch.ops
