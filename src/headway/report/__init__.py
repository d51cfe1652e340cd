"""Reads run folders and writes pages and texts for people.

In: metrics, summary, provenance, row files and checkpoints of runs. Out: panels on one HTML page, or text.
Open `run_report.py` first; each `*_panels.py` builds the panels of one subject.
"""
