"""Hybrid execution: written imperatively, run symbolically, shipped with its parameters."""
