"""What this library is called."""

NAME = "kagent_kernels"
VERSION = "1.5.2"
NAMESPACE = "kagent_kernels_df6f6e94"  # of its operators in torch.ops
