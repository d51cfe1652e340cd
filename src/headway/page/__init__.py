"""Draws panels as one self-contained HTML file.

In: `Panel` objects, which any room builds with the functions of `panel.py`. Out: HTML text without outside requests.
Open first: `panel.py` (data of a chart), then `renderer.py` (the page). `panel_data.py` checks the data of each kind.
Knows no producer: a panel is drawn by its kind alone.
"""

from headway.page.panel import Panel

__all__ = ["Panel"]
