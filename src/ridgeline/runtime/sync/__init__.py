"""Gradient synchronisation: what carries buckets, what makes them smaller, and when it happens."""
