"""Where plans lie in memory, and the launchers over it."""
