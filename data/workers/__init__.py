"""Worker processes that die or hang: which sample they were at, and what is left out so that the rest goes on."""
