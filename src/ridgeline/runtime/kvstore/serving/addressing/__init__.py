"""Where servers are, and who is let in."""
