"""Ways to exchange gradients or parameters that a search compares."""
