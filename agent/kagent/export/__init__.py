"""Winners of runs as a library that PyTorch users install: verified, measured, certified."""
