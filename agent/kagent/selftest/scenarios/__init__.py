"""What no candidate file could do: a module per chapter, a function per scenario."""
