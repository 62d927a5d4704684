"""The builder: from a candidate's source to plans and binaries, without a GPU and without trusting
the candidate.
"""
