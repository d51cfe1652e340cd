"""What bench.soak is made of: a network that is watched, faults from outside, and what they left behind."""
