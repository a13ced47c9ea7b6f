"""Buckets: which gradients share one, when it is full, and when it leaves."""
