"""A run to look at: one HTML page, and what bought what."""
