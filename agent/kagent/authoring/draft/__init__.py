"""A task as it is being made: its cases, tried on real tensors, and the files written for it."""
