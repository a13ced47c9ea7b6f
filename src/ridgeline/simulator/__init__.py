"""The simulator: a training step on a virtual clock, from a machine, a workload and a plan."""
