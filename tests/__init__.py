"""The tests, which mirror the tree. A package, because others install one of this name."""
