"""Calling functions and modules in another mode: forms, graphs, the search for the fastest."""
