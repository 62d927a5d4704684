"""Seeds out of Inductor, torch.compile's code generator: traced, generated and rewritten in a
process of their own, without the device they are for.
"""
