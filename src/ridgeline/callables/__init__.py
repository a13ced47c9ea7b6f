"""Callables in another mode: written imperatively, run symbolically, shipped with their parameters."""
