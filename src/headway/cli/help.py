"""The help of a verb: its options under the headings that their declarations name, and the usual commands below."""

from __future__ import annotations

from typing import Any, final

from typer.core import TyperCommand


@final
class VerbWithGroups(TyperCommand):
    """A verb whose help lists the options by their `rich_help_panel`, each group under its own heading.

    typer itself does so only for help that is drawn in boxes.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the arguments, then the options by heading, those without a heading as `Options` at the end."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is None:
                continue
            default = "Arguments" if parameter.param_type_name == "argument" else "Options"
            groups.setdefault(getattr(parameter, "rich_help_panel", None) or default, []).append(record)
        groups["Options"] = groups.pop("Options", [])
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)
