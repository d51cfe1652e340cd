"""Figures of five sets of slides on deep learning at scale, and what Headway has beside each of them."""
