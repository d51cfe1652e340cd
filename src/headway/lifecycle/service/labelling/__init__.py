"""The label page: queues of samples to look at, grids leased to people, their labels, and the loop above them."""
