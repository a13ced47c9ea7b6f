"""The workers that train together: who they are, how they agree, and who is missing."""
