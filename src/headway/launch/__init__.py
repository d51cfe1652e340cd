"""Starts the processes of a run on one host or several, and keeps the run alive when one is lost.

In: a command, hosts and the recipe's `comm`. Out: workers with their output, and `Ranks`, by which a worker talks to
the other ranks. Read `launcher.py` first (the launcher's side), then `ranks.py` (a worker's side); `handover.py` brings
the ranks of a new generation to one state.
"""
