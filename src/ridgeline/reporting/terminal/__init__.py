"""The nouns as text for the terminal."""
