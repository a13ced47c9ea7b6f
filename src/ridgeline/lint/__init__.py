"""What a CUDA graph can hold: the linter, and trials in a child process."""
