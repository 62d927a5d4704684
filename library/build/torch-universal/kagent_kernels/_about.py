"""What this library is called."""

NAME = "kagent_kernels"
VERSION = "1.5.3"
NAMESPACE = "kagent_kernels_1ac4d6c2"  # of its operators in torch.ops
