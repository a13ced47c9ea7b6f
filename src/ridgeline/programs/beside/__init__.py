"""Weight gradients of compiled steps, computed beside the rest of the backward pass."""
