"""What crosses process boundaries: plans, tasks, verdicts, requests."""
