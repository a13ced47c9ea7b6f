"""The whole training step as one program: traced, compiled, packaged."""
