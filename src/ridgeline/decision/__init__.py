"""From a script's step to a plan: measured, traced, chosen, tried, and remembered for the next start."""
