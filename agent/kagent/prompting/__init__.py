"""Prompts: templates and technique cards of prompts/, filled in from a run."""

from kagent.prompting.prompter import TEMPLATES, Prompter
from kagent.prompting.run_facts import RunFacts, run_facts_of

__all__ = ["TEMPLATES", "Prompter", "RunFacts", "run_facts_of"]
