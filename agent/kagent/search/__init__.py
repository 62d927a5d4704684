"""What to try next, and the tuner."""
