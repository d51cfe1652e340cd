"""The floor under all rooms: no room of Headway is imported here, and torch is only imported inside functions.

In: recipe files, run folders, the environment of a launcher, bytes from other processes and from strangers.
Out: validated recipes, random keys, files written atomically, worlds of ranks with their groups, and errors.

Open first: `errors` (every message of Headway), `recipe` (loading and overrides), `run_folder` (the layout of a run),
`world` (ranks and groups; below it `rendezvous`, `gloo`, `key_value_store`, `channel`), `random_keys` (every random
choice), `collectives` (the cost model of all-reduce), `workload` and `profile` (the JSON that a planner reads).
"""
