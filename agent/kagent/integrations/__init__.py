"""Other search systems with kagent's judge as their evaluator, and with recorded replies as their
model: so that searches, and nothing else, are compared.
"""
