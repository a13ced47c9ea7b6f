"""How the workers of a job come to have servers."""
