"""Suites: a small search for each problem of a list, and one report over all of them."""
