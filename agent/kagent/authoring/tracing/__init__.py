"""An operation and an example of its call, run on symbolic tensors: what follows for a task."""
