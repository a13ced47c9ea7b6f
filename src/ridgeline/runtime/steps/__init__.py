"""One training step under a plan: its body, its graphs, the step as one program, and their checks."""
