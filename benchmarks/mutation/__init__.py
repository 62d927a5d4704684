"""Small mistakes made in kernels on purpose, to see whether the judge notices them."""
