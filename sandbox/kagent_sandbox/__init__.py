"""What runs, checks and times untrusted kernels. Never imports `kagent`."""
