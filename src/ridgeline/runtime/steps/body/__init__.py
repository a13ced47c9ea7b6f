"""The body of a step, and what it asks of model, loss and optimizer."""
