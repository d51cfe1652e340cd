"""Parts of bench.soak: a network that records its weights, faults from outside, and their traces."""
