"""Layers: what they compute, and what splitting them or their samples would send."""
