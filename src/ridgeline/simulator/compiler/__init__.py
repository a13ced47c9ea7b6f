"""What torch's compiler makes of a step, foreseen or read off its programs."""
