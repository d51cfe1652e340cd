"""Parts of `bench.plan`: published measurements, and the planner's predictions for them."""
