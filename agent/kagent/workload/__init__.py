"""A user's own script: where its steps spend their time, and what a library's kernels change."""
