"""How a model is laid out over the mesh of workers: who holds what, and how that comes about."""
