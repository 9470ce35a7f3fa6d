"""Sources of images with captions. Each yields the same `Sample`, however its files are laid out."""
