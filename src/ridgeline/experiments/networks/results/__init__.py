"""What the experiment found, summed up and shown."""
