"""The tuning ladder: its contestants, its rungs, and what slides on the same subject claim."""
