"""Functions and modules for users."""
