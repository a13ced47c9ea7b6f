"""State that is saved and put back: random numbers, tensors, whole networks with their optimizer."""
