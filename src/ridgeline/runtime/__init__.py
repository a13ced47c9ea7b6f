"""Running: the step under a plan, and everything around it on real devices."""
