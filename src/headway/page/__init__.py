"""Charts and one-file HTML from panels. Knows no producer: it draws a panel by its kind."""

from headway.page.panel import Panel

__all__ = ["Panel"]
