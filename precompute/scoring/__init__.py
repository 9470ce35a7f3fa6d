"""Scores of image-caption pairs and near-duplicate images, by a contrastive model."""
