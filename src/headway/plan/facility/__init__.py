"""Plans the room that holds a number of nodes: racks, power, heat, switches, cables, and the storage that feeds them.

In: a `FacilityRequest`. Out: a `FacilityPlan`, its text, its page and its list of cables.

Open first: `design.py` (request -> plan), then `fabric.py` (switches between nodes) and `storage.py` (switches and
servers of the storage).
"""
