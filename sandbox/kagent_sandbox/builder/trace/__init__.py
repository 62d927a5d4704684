"""Host code on symbolic tensors, recorded as a plan."""
