"""Predicts how long training takes on machines you have not rented yet, and plans the room that holds them.

In: a workload (`headway train --dry-run` writes it), a cluster from the catalog or a YAML file, optional profiles.
Out: a `JobPlan` (time, energy, cost, limit for each node count) or a `FacilityPlan` (racks, power, switches, cables).

Open first: `request.py` (options -> `JobPlan`), then `prediction.py` (one node count) and `step.py` (one step).
Pure functions on numpy. Never imports torch: plans work where torch is not installed.
"""
