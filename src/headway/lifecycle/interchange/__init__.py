"""Interchange: annotations of other programs in and out, data set descriptions, and where weights come from."""
