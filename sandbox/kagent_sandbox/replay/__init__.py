"""Replay of a candidate's source on real tensors, compared with its plan."""
