"""A file that does not parse.

entry: double(x: float32[4096]) -> float32[4096]
refused: COMPILE_ERROR: SyntaxError
"""


def double(x)  # HERE
    return x
