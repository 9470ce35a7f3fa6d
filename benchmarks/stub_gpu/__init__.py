"""A GPU that computes nothing, on which all that the host does for a GPU can be tried without one (see `build`)."""
