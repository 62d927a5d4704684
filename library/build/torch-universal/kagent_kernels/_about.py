"""What this library is called."""

NAME = "kagent_kernels"
VERSION = "1.3.0"
NAMESPACE = "kagent_kernels_4b375eb5"  # of its operators in torch.ops
