"""Parts of the tuning ladder: its contestants, its rungs, and claims of published slides on the same subject."""
