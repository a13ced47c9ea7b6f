"""What a machine does to a training step, in tables and sentences for terminal and page."""
