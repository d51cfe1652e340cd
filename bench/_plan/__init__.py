"""Parts of `bench.plan`: published measurements, and what the planner predicts of them."""
