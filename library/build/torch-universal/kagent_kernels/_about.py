"""What this library is called."""

NAME = "kagent_kernels"
VERSION = "1.5.4"
NAMESPACE = "kagent_kernels_e5f870f7"  # of its operators in torch.ops
