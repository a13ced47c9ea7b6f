"""The experiments of `ridgeline bench`: ours beside what others offer, in turns, on this machine."""
