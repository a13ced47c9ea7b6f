"""What this process asks of its system: memory, speed, threads for messages."""
