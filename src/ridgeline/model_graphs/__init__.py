"""The model of a training step as captured graphs, inside a step that runs as it was written."""
