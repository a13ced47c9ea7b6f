"""Training through a key-value store: a transport and a synchronizer whose servers update the parameters."""
