"""Showing: the nouns as an HTML page, as text for the terminal, and as a trace for Perfetto."""
