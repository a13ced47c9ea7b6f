"""Random numbers of a step as one program: which it draws, in which order, and which decide nothing."""
