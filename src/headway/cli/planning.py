"""The verb `plan`: predicts training on machines you do not have yet. `main` has the other verbs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.screen import LOG, Json, Overrides, list_given_options, print_result
from headway.core.errors import UsageError
from headway.core.files import expect_writable, write_atomically

if TYPE_CHECKING:
    from headway.core.workload import Workload
    from headway.plan.job_plan import JobPlan
    from headway.plan.request import PlanRequest

# Gradients of a job in a facility for which no workload is given: ResNet-50's 25.6 million weights in fp32.
DEFAULT_GRADIENT_MB = 102.2

# In place of any name of the catalog: asks for the catalog.
LIST = "list"

WORKLOAD_HELP = (
    "A recipe, the workload that headway train RECIPE --dry-run wrote, or the name of a network: resnet18, resnet50,"
    " alexnet, vgg11, vgg16, googlenet, bert-large."
)
PROFILE_HELP = (
    "Profile that headway doctor wrote on one such device. A second one, made with --procs, adds the links between the"
    " ranks of a host."
)

# Options of a question about data alone, which needs neither a workload nor a cluster.
DATA_OPTIONS = {"errors_at", "sizes_at", "error_target", "as_json"}

# Options that --facility refuses, and options that need it: the two kinds of plan share only the workload, --image-kb,
# --page and --json.
JOB_OPTIONS = {
    "cluster", "nodes", "profile", "runs", "per_device", "batch", "accumulate", "spread", "epochs_at", "noise_scale",
    "deadline", "price", "errors_at", "sizes_at", "error_target", "trace",
}  # fmt: skip
FACILITY_OPTIONS = {
    "node", "node_kw", "rack_kw", "ports", "oversubscription", "leaf", "core", "images_s", "data_gb", "pue",
    "air_rise", "miles", "hours", "jobs", "cables",
}  # fmt: skip


def _job_option(help_text: str, *names: str, **limits: Any) -> Any:
    """Declares an option of a job on a cluster."""
    return typer.Option(*names, help=help_text, rich_help_panel="A job on a cluster", **limits)


def _facility_option(help_text: str, **looks: Any) -> Any:
    """Declares an option of a facility."""
    return typer.Option(help=help_text, rich_help_panel="A facility", **looks)


# typer reads the options of a verb from its signature: there is no other place for 38 of them. The body passes them on
# as one PlanRequest.
def plan(
    context: typer.Context,
    workload: Annotated[Path | None, typer.Argument(metavar="RECIPE|WORKLOAD.json|NETWORK", help=WORKLOAD_HELP)] = None,
    overrides: Overrides = None,
    cluster: Annotated[
        str | None, _job_option("A cluster of the catalog, or a YAML file. `list` prints the catalog.")
    ] = None,
    nodes: Annotated[str | None, _job_option("Node counts: 1..64 (doubling) or 1,2,4. Default: up to 64.")] = None,
    profile: Annotated[list[Path] | None, _job_option(PROFILE_HELP)] = None,
    runs: Annotated[str | None, _job_option("Runs measured on such a cluster: DEVICESxSAMPLES:IMAGES_S,...")] = None,
    per_device: Annotated[float | None, _job_option("Samples per device: the batch grows with the nodes.")] = None,
    batch: Annotated[
        float | None,
        _job_option("Global batch for every node count. Default: the recipe's; networks by name have one per device."),
    ] = None,
    accumulate: Annotated[int | None, _job_option("Micro-batches per step.", min=1)] = None,
    spread: Annotated[bool, _job_option("Spread the nodes over all groups of the cluster.", "--spread")] = False,
    epochs_at: Annotated[str | None, _job_option("Epochs to the target by batch: BATCH:EPOCHS,...")] = None,
    noise_scale: Annotated[float | None, _job_option("Gradient noise scale, from a run's report.")] = None,
    deadline: Annotated[float | None, _job_option("Time limit in hours: find the node counts that meet it.")] = None,
    price: Annotated[float | None, _job_option("Price of a node per hour.")] = None,
    errors_at: Annotated[
        str | None, _job_option("Errors by training set size: SAMPLES:ERROR,..., files of such lines, or run folders.")
    ] = None,
    sizes_at: Annotated[
        str | None, _job_option("Parameters of the best network by training set size: SAMPLES:NUMBER,...")
    ] = None,
    error_target: Annotated[
        float | None, _job_option("Find the training set for this error, from --errors-at alone.")
    ] = None,
    trace: Annotated[Path | None, _job_option("Simulate the largest node count; write a Perfetto trace.")] = None,
    facility: Annotated[
        str | None, _facility_option("Plan a facility for this many nodes, instead of a job.", metavar="NODES")
    ] = None,
    node: Annotated[
        str, _facility_option("Node type: a cluster of the catalog, or a YAML file. `list` prints the catalog.")
    ] = "dgx-1",
    node_kw: Annotated[float | None, _facility_option("Power of a node in kW. Default: the catalog's.")] = None,
    rack_kw: Annotated[float, _facility_option("Power and cooling of a rack, in kW.")] = 19.2,
    ports: Annotated[int | None, _facility_option("Ports of a node in the fabric. Default: all.")] = None,
    oversubscription: Annotated[float, _facility_option("Largest oversubscription between leaf switches.")] = 2.0,
    leaf: Annotated[int | None, _facility_option("Ports of a leaf switch: 36, 40, 64, 128, 216, 324.")] = None,
    core: Annotated[int | None, _facility_option("Ports of a core switch.")] = None,
    images_s: Annotated[
        float | None, _facility_option("Training rate in images/s. Default: the workload's or ResNet-50's.")
    ] = None,
    image_kb: Annotated[
        float | None, typer.Option(help="Size of an encoded image in kB. Default: the workload's.")
    ] = None,
    data_gb: Annotated[
        float | None, _facility_option("Size of the training set in GB. Default: the workload's.")
    ] = None,
    pue: Annotated[float, _facility_option("Power of the building, divided by that of the machines.")] = 1.4,
    air_rise: Annotated[float, _facility_option("Kelvin by which air may warm up in a rack.")] = 15.0,
    miles: Annotated[float | None, _facility_option("Simulated driving: the hours that this distance takes.")] = None,
    hours: Annotated[float | None, _facility_option("The nodes that drive --miles in this time.")] = None,
    cables: Annotated[Path | None, _facility_option("Also write the list of all cables as CSV.")] = None,
    jobs: Annotated[str | None, _facility_option("Place jobs on the nodes: NODES[:MB of gradients],...")] = None,
    page: Annotated[Path | None, typer.Option(help="Also write the plan as an HTML page.")] = None,
    as_json: Json = False,
) -> None:
    """Plan machines before you rent them.

    Predict a job on a cluster. With --facility, plan the racks, the fabric and the storage of a facility instead.
    """
    if LIST in (cluster, node, facility) or (workload == Path(LIST) and not workload.exists()):
        from headway.plan.catalog_text import describe_catalog, format_catalog

        print_result(describe_catalog(), as_json, format_catalog())
        return
    expect_writable(page, trace, cables)
    # The planner imports numpy: not needed for the help of other verbs.
    from headway.plan.parsing import parse_facility
    from headway.plan.request import PlanRequest, plan_job

    given_options = list_given_options(context)
    request = PlanRequest(
        cluster=cluster, nodes=nodes, profile=tuple(profile or ()), runs=runs, per_device=per_device, batch=batch,
        accumulate=accumulate, spread=spread, epochs_at=epochs_at, noise_scale=noise_scale, deadline=deadline,
        price=price, errors_at=errors_at, sizes_at=sizes_at, error_target=error_target, image_kb=image_kb,
        facility=None if facility is None else parse_facility(facility), node=node, node_kw=node_kw, rack_kw=rack_kw,
        ports=ports, oversubscription=oversubscription, leaf=leaf, core=core, images_s=images_s, data_gb=data_gb,
        pue=pue, air_rise=air_rise, miles=miles, hours=hours,
    )  # fmt: skip
    if facility is not None:
        _refuse_options(given_options & JOB_OPTIONS, "plans a job on a cluster, and --facility plans a room")
        known_workload = None if workload is None else _read_workload(workload, overrides or ())
        _write_facility(known_workload, request, jobs, page, cables, as_json)
        return
    _refuse_options(given_options & FACILITY_OPTIONS, "plans a room and needs --facility")
    if workload is None and cluster is None and (errors_at is not None or error_target is not None):
        _write_growth(request, given_options, as_json)
        return
    if error_target is not None:
        fix = "Leave the workload and --cluster out: headway plan --errors-at 1e5:0.32,1e6:0.24 --error-target 0.2."
        raise UsageError("--error-target asks about data alone", fix=fix)
    if workload is None or cluster is None:
        fix = "Write headway plan WORKLOAD.json --cluster dgx-1 --nodes 1..64, or headway plan --facility 36."
        raise UsageError("plan needs a job and a cluster, or the nodes of a facility", fix=fix)
    _write_plan(plan_job(_read_workload(workload, overrides or ()), request), page, trace, as_json)


def _refuse_options(options: set[str], reason: str) -> None:
    """Raises UsageError if there are options of the other kind of plan."""
    if options:
        name = "--" + min(options).replace("_", "-")
        fix = "Write headway plan --facility 36, or headway plan WORKLOAD.json --cluster dgx-1."
        raise UsageError(f"{name} {reason}", fix=fix)


def _write_plan(plan: JobPlan, page: Path | None, trace: Path | None, as_json: bool) -> None:
    """Prints a job plan. Writes its page and its trace if their paths are given."""
    from headway.plan.job_plan_text import format_plan

    if page is not None:
        from headway.plan import job_plan_page

        job_plan_page.write_page(plan, page)
        LOG.info(f"Wrote {page}.")
    if trace is not None:
        from headway.plan.step_simulation import simulate_prediction

        largest = plan.predictions[-1]
        simulate_prediction(plan.job, plan.cluster, largest).write_trace(trace)
        LOG.info(f"Wrote {trace}: {largest.devices:,} devices, the slowest of them step by step.")
    # The rates of other networks at other image sizes take a fifth of a second, which the text has no use for.
    print_result(plan.to_json() if as_json else None, as_json, format_plan(plan))


def _write_growth(request: PlanRequest, given_options: set[str], as_json: bool) -> None:
    """Prints the gain of more data, and the data that an error needs, from measured errors alone."""
    from headway.plan.growth import predict_data_need
    from headway.plan.growth_text import format_growth, format_need
    from headway.plan.job_plan import replace_infinite
    from headway.plan.request import plan_growth

    _refuse_options(given_options - DATA_OPTIONS, "plans a job, and here are only errors by training set size")
    growth = plan_growth(None, request)
    if growth is None:
        fix = "Give two or more of them: --errors-at 1e5:0.32,1e6:0.24."
        raise UsageError("an error to reach needs errors that were measured", where="--error-target", fix=fix)
    need = None if request.error_target is None else predict_data_need(growth.error, request.error_target)
    lines = [*([] if need is None else [*format_need(need), ""]), *format_growth(growth)]
    result = {"need": None if need is None else asdict(need), "growth": asdict(growth)}
    print_result(replace_infinite(result), as_json, "\n".join(lines))


def _write_facility(
    workload: Workload | None,
    request: PlanRequest,
    jobs: str | None,
    page: Path | None,
    cables: Path | None,
    as_json: bool,
) -> None:
    """Plans a facility and prints the plan. Writes its page and its list of cables if their paths are given.

    Args:
        jobs: jobs to place on the nodes, as NODES[:MB of gradients],...
    """
    from headway.plan.facility.design import plan_facility
    from headway.plan.facility.placement import parse_jobs, place_jobs
    from headway.plan.facility.text import format_facility

    plan = plan_facility(request.to_facility_request(workload))
    gradient_bytes = DEFAULT_GRADIENT_MB * 1e6 if workload is None else float(workload.step.exchange.gradient_bytes)
    placement = None if jobs is None else place_jobs(parse_jobs(jobs, gradient_bytes), plan.pods)
    simulation = request.predict_simulation(plan.wanted.nodes)
    if page is not None:
        from headway.plan.facility import page as facility_page

        facility_page.write_page(plan, page, placement, simulation)
        LOG.info(f"Wrote {page}.")
    if cables is not None:
        from headway.plan.facility.cables import format_cables

        write_atomically(cables, format_cables(plan))
        LOG.info(f"Wrote {cables}.")
    result: dict[str, Any] = plan.to_json() | ({} if placement is None else {"placement": placement.to_json()})
    result |= {} if simulation is None else {"simulation": asdict(simulation)}
    print_result(result, as_json, format_facility(plan, placement, simulation))


def _read_workload(path: Path, overrides: Sequence[str]) -> Workload:
    """Reads a workload, finds it in the catalog, or builds it from a recipe by a dry run, which builds the network."""
    from headway.core.workload import Workload
    from headway.plan.workloads import find_workload

    # A file wins over a name of the catalog.
    if not path.suffix and not path.exists():
        return find_workload(str(path), tuple(overrides))
    if path.suffix not in (".yaml", ".yml"):
        if overrides:
            fix = "Give the recipe instead of the workload, or leave the overrides out."
            raise UsageError("only a recipe has values to override, and this is a workload", where=str(path), fix=fix)
        return Workload.read(path)
    # The planner loads no torch. Only a recipe needs it: the dry run builds its network.
    from headway.training.dry_run import dry_run

    return dry_run(path, overrides, compiles=False).workload
