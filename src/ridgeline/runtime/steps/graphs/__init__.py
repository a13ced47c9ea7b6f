"""Steps that GPUs replay: cleared for a capture, captured, checked."""
