"""The verb that plans what is not there yet. `cli` has the others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.screen import Json, print_result, say
from headway.core.errors import UsageError
from headway.core.files import expect_writable

if TYPE_CHECKING:
    from headway.core.workload import Workload
    from headway.plan.cluster import Cluster
    from headway.plan.facility import Wanted
    from headway.plan.report import Plan

GRADIENT_MB = 102.2
"""Of a job whose network nothing is known of: ResNet-50's 25.6 million weights in fp32."""

OF_PLAN, OF_FACILITY = "A job on a cluster", "A facility"


def plan(
    context: typer.Context,
    workload: Annotated[
        Path | None,
        typer.Argument(
            metavar="RECIPE|WORKLOAD.json", help="A recipe, or what headway train RECIPE --dry-run wrote of one."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="key=value", help="Values instead of the recipe's.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="By its name in the catalog, or a YAML file.", rich_help_panel=OF_PLAN)
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(help="So many: 1..64 (doubling), or 1,2,4; default: up to 64.", rich_help_panel=OF_PLAN),
    ] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option(
            help="headway doctor's, of one such device; a second one, made with --procs, says what ranks of a host"
            " can tell each other.",
            rich_help_panel=OF_PLAN,
        ),
    ] = None,
    runs: Annotated[
        str | None,
        typer.Option(help="Runs that were measured there: DEVICESxSAMPLES:IMAGES_S,...", rich_help_panel=OF_PLAN),
    ] = None,
    per_device: Annotated[
        float | None, typer.Option(help="Samples of a device; default: of one in the dry run.", rich_help_panel=OF_PLAN)
    ] = None,
    batch: Annotated[
        float | None, typer.Option(help="Of all devices, whatever their number.", rich_help_panel=OF_PLAN)
    ] = None,
    accumulate: Annotated[
        int | None,
        typer.Option(min=1, help="Micro-batches before gradients are exchanged.", rich_help_panel=OF_PLAN),
    ] = None,
    spread: Annotated[
        bool,
        typer.Option("--spread", help="Its nodes lie among those of others, in all groups.", rich_help_panel=OF_PLAN),
    ] = False,
    epochs_at: Annotated[
        str | None,
        typer.Option(help="Epochs that batches took to the target: BATCH:EPOCHS,...", rich_help_panel=OF_PLAN),
    ] = None,
    noise_scale: Annotated[
        float | None, typer.Option(help="The gradient's, as a run's report has it.", rich_help_panel=OF_PLAN)
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(help="Hours: how many nodes keep it.", rich_help_panel=OF_PLAN)
    ] = None,
    price: Annotated[float | None, typer.Option(help="Of a node for an hour.", rich_help_panel=OF_PLAN)] = None,
    errors_at: Annotated[
        str | None,
        typer.Option(help="Errors of sets so large: SAMPLES:ERROR,...; what more give.", rich_help_panel=OF_PLAN),
    ] = None,
    sizes_at: Annotated[
        str | None,
        typer.Option(help="Parameters of the best networks for them: SAMPLES:NUMBER,...", rich_help_panel=OF_PLAN),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Simulate the most nodes; write a trace for Perfetto.", rich_help_panel=OF_PLAN)
    ] = None,
    facility: Annotated[
        int | None, typer.Option(help="Plan a room for so many nodes instead.", rich_help_panel=OF_FACILITY)
    ] = None,
    node: Annotated[
        str, typer.Option(help="Their kind, by its name in the catalog.", rich_help_panel=OF_FACILITY)
    ] = "dgx-1",
    node_kw: Annotated[
        float | None, typer.Option(help="Power of one; default: the catalog's.", rich_help_panel=OF_FACILITY)
    ] = None,
    rack_kw: Annotated[float, typer.Option(help="Power and cooling of a rack.", rich_help_panel=OF_FACILITY)] = 19.2,
    ports: Annotated[
        int | None, typer.Option(help="Of a node, in the fabric; default: all.", rich_help_panel=OF_FACILITY)
    ] = None,
    oversubscription: Annotated[
        float, typer.Option(help="Between leaf switches, at most.", rich_help_panel=OF_FACILITY)
    ] = 2.0,
    leaf: Annotated[
        int | None, typer.Option(help="Ports of a leaf switch: 36, 40, 64, 128, 216, 324.", rich_help_panel=OF_FACILITY)
    ] = None,
    core: Annotated[int | None, typer.Option(help="Ports of a core switch.", rich_help_panel=OF_FACILITY)] = None,
    images_s: Annotated[
        float | None,
        typer.Option(
            help="That one node trains on; default: the workload's, else ResNet-50's.", rich_help_panel=OF_FACILITY
        ),
    ] = None,
    image_kb: Annotated[
        float | None, typer.Option(help="Of an encoded image, also of a job's; default: the workload's.")
    ] = None,
    data_gb: Annotated[
        float | None, typer.Option(help="Of the whole set; default: the workload's.", rich_help_panel=OF_FACILITY)
    ] = None,
    pue: Annotated[
        float, typer.Option(help="Power of the building over the machines'.", rich_help_panel=OF_FACILITY)
    ] = 1.4,
    jobs: Annotated[
        str | None,
        typer.Option(help="Place jobs of so many nodes: NODES[:MB of gradients],...", rich_help_panel=OF_FACILITY),
    ] = None,
    page: Annotated[Path | None, typer.Option(help="Draw it as an HTML file too.")] = None,
    as_json: Json = False,
) -> None:
    """Plan machines before they are rented: what they would give a job, or what a room for them takes."""
    expect_writable(page, trace)
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    if facility is not None:
        _refuse(given & PLAN_ONLY, "is of a job on a cluster, and --facility plans a room")
        from headway.plan import facility as rooms

        known = None if workload is None else _workload(workload, overrides or ())
        wanted = rooms.wanted_for(
            known,
            nodes=facility,
            node=node,
            node_watts=None if node_kw is None else node_kw * 1e3,
            rack_watts=rack_kw * 1e3,
            ports=ports,
            oversubscription=oversubscription,
            leaf=leaf,
            core=core,
            images_s=images_s,
            image_bytes=None if image_kb is None else image_kb * 1e3,
            data_bytes=None if data_gb is None else data_gb * 1e9,
            pue=pue,
        )
        gradients = GRADIENT_MB * 1e6 if known is None else float(known.step.exchange.gradient_bytes)
        _facility(wanted, jobs, gradients, page, as_json)
        return
    _refuse(given & FACILITY_ONLY, "is of a room: it goes with --facility")
    if workload is None or cluster is None:
        fix = "headway plan WORKLOAD.json --cluster dgx-1 --nodes 1..64, or headway plan --facility 36."
        raise UsageError("plan wants a job and a cluster, or a facility's nodes", fix=fix)
    from headway.plan.options import Asked, planned

    found, where = planned(
        _workload(workload, overrides or ()),
        cluster,
        Asked(
            nodes=nodes,
            profiles=tuple(profile or ()),
            runs=runs,
            per_device=per_device,
            batch=batch,
            accumulate=accumulate,
            spread=spread,
            epochs_at=epochs_at,
            noise_scale=noise_scale,
            deadline_h=deadline,
            price=price,
            errors_at=errors_at,
            sizes_at=sizes_at,
            image_bytes=None if image_kb is None else image_kb * 1e3,
        ),
    )
    _written(found, where, page, trace, as_json)


PLAN_ONLY = {
    "cluster", "nodes", "profile", "runs", "per_device", "batch", "accumulate", "spread", "epochs_at", "noise_scale",
    "deadline", "price", "errors_at", "sizes_at", "trace",
}  # fmt: skip
FACILITY_ONLY = {
    "node", "node_kw", "rack_kw", "ports", "oversubscription", "leaf", "core", "images_s", "data_gb", "pue",
    "jobs",
}  # fmt: skip


def _refuse(given: set[str], why: str) -> None:
    if given:
        name = "--" + min(given).replace("_", "-")
        fix = "headway plan --facility 36, or headway plan WORKLOAD.json --cluster dgx-1."
        raise UsageError(f"{name} {why}", fix=fix)


def _written(found: Plan, cluster: Cluster, page: Path | None, trace: Path | None, as_json: bool) -> None:
    from headway.plan.report import text

    if page is not None:
        from headway.plan import page as pages

        pages.write(found, page)
        say(f"Wrote {page}.")
    if trace is not None:
        from headway.plan.simulate import of_answer

        last = found.answers[-1]
        of_answer(found.job, cluster, last).write(trace)
        say(f"Wrote {trace}: {last.devices:,} devices, the slowest of them step by step.")
    print_result(found.to_json(), as_json, text(found))


def _facility(wanted: Wanted, jobs: str | None, gradient_bytes: float, page: Path | None, as_json: bool) -> None:
    from headway.plan.facility import facility
    from headway.plan.facility_text import text
    from headway.plan.placement import place, read_jobs

    found = facility(wanted)
    placed = None if jobs is None else place(read_jobs(jobs, gradient_bytes), found.pods)
    if page is not None:
        from headway.plan import facility_page

        facility_page.write(found, page, placed)
        say(f"Wrote {page}.")
    result: dict[str, Any] = found.to_json() | ({} if placed is None else {"placement": placed.to_json()})
    print_result(result, as_json, text(found, placed))


def _workload(path: Path, overrides: Sequence[str]) -> Workload:
    """Read, or made of a recipe by a dry run, which builds the network."""
    from headway.core.workload import Workload

    if path.suffix not in (".yaml", ".yml"):
        if overrides:
            raise UsageError("a workload has no values to override; a recipe has", where=str(path))
        return Workload.read(path)
    from headway.train.dry_run import dry_run

    return dry_run(path, overrides, compiles=False, say=say).workload
