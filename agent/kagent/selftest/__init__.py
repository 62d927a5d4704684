"""`kagent selftest`: the corpus of faults, attacks and cheats, run on this machine.

`catalogue` reads the corpus, `assemble` its files, `evaluator` evaluates one candidate as a run would,
`bait` and `outside` notice what an attack achieved whatever the verdict says, `compare` holds what
came against what was expected, `runner` does it all in order, and `digest` keeps the outcome for
later runs.
"""
