"""Memory across runs: winners and what techniques did, for later runs of related tasks."""
