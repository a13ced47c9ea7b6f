"""Batches and tensors: recognised, copied, laid out."""
