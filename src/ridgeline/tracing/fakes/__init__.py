"""Tensors without data that stand in for the user's."""
