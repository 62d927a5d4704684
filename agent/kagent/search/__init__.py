"""Selection of the next attempt, and the tuner."""
