"""Machines on which builders and judges run: this one, or the nodes of a Ray cluster."""
