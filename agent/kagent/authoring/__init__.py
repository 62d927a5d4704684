"""Making tasks: from PyTorch code and other suites' files, with seeds and calibrated tolerances."""
