"""Sparse gradients: rows that are gathered and summed."""
