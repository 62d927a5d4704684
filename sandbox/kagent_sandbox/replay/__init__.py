"""Does a candidate's source do what its plan says? On real tensors."""
