"""What is known of a single operator: work, bytes, family, operands."""
