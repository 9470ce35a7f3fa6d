"""Image and text encoders behind two small classes; each builder takes keyword arguments only."""
