"""Confined child processes: fork-server, supervisor, channel, limits."""
