"""Sections of the report, as HTML."""
