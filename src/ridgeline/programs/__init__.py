"""Programs of torch's compiler: options, passes of our own, and the forms that hold them."""
