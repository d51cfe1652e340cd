"""Trains one network on several devices in other ways than by equal copies.

Open first: `strips.py` (images split by rows and columns over the ranks of a place), then `rows.py` (who owns and needs
which rows) and `fetch.py` (the exchange).
"""
