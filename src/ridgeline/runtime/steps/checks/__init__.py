"""Whether a mode of execution computes what the plain step does, and how far the two are apart."""
