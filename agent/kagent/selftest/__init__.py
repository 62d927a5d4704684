"""`kagent selftest`: the corpus of faults, attacks and cheats, run on this machine.

`catalogue` reads the corpus, `assemble` its files. `evaluator` evaluates one candidate as a run
would. `bait` and `leftovers` notice what an attack achieved, whatever the verdict says.
`expectations` compares outcomes with what was expected. `runner` does it all in order.
"""
