"""What optimizers take for granted: states in tensors, fused kernels, calls around a step."""
