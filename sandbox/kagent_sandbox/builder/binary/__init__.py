"""What a binary is and uses."""
