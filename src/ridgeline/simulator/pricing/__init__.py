"""What each operator of a step costs on a machine."""
