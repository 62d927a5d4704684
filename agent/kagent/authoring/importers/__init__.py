"""Files of other suites as tasks."""
