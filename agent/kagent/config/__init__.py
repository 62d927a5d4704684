"""Options of a run, and where they come from."""
