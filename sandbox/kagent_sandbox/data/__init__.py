"""Records that cross process boundaries: plans, tasks, verdicts, requests."""
