"""What this library is called."""

NAME = "kagent_kernels"
VERSION = "1.4.0"
NAMESPACE = "kagent_kernels_1c2cef4c"  # of its operators in torch.ops
