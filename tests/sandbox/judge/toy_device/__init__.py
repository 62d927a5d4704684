"""A device as somebody else would add it: a simulated one, in a folder of its own."""
