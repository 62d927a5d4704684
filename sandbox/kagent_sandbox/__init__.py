"""Build, run, check and time untrusted kernels. Never imports `kagent`."""
