"""Language models: what they are sent, how they are called, what they answer, what it costs."""
