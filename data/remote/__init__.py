"""Object stores and HTTP servers."""
