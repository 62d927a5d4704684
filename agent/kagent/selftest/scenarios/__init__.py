"""Attacks that no candidate file could make: a module per chapter, a function per scenario."""
