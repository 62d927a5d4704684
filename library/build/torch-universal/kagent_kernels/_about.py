"""What this library is called."""

NAME = "kagent_kernels"
VERSION = "1.5.0"
NAMESPACE = "kagent_kernels_d83fb059"  # of its operators in torch.ops
