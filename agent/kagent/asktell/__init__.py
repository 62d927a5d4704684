"""Runs that are answered from outside: prompts go out as files, answers come in as files, and
judging may happen on another machine.
"""
