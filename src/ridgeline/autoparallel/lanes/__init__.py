"""What carries schedules out: threads, streams, devices."""
