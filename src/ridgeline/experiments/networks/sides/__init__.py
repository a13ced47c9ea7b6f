"""What a child process does with one network."""
