"""Placement of plans in memory, and launchers over it."""
