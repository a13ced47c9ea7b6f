"""Whether a captured program still computes what its code would: the compiler's guards, checked by us."""
