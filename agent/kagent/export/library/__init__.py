"""Modules that every exported library carries: what its operators are made of.

They import nothing but torch, the standard library and each other, and are copied as they are.
"""
