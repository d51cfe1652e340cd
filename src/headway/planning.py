"""The verb that plans what is not there yet. `cli` has the others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.core.errors import UsageError
from headway.screen import Json, say, show

GRADIENT_MB = 102.2
"""Of a job whose network nothing is known of: ResNet-50's 25.6 million weights in fp32."""


def plan(
    workload: Annotated[
        Path | None, typer.Argument(help="What headway train RECIPE --dry-run wrote: images, and gradients.")
    ] = None,
    facility: Annotated[int | None, typer.Option(help="Plan a room for so many nodes.")] = None,
    node: Annotated[str, typer.Option(help="Their kind, by its name in the catalog.")] = "dgx-1",
    node_kw: Annotated[float | None, typer.Option(help="Power of one; default: the catalog's.")] = None,
    rack_kw: Annotated[float, typer.Option(help="Power and cooling of a rack.")] = 19.2,
    ports: Annotated[int | None, typer.Option(help="Of a node, in the fabric; default: all it has.")] = None,
    oversubscription: Annotated[float, typer.Option(help="Between leaf switches, at most.")] = 2.0,
    leaf: Annotated[int | None, typer.Option(help="Ports of a leaf switch: 36, 40, 64, 128, 216 or 324.")] = None,
    core: Annotated[int | None, typer.Option(help="Ports of a core switch.")] = None,
    images_s: Annotated[float | None, typer.Option(help="That one node trains on; default: ResNet-50's.")] = None,
    image_kb: Annotated[float | None, typer.Option(help="Of an encoded image; default: the workload's.")] = None,
    data_gb: Annotated[float | None, typer.Option(help="Of the whole set; default: the workload's.")] = None,
    pue: Annotated[float, typer.Option(help="Power of the building over that of the machines.")] = 1.4,
    jobs: Annotated[
        str | None, typer.Option(help="Place jobs of so many nodes, by commas; NODES:MB says their gradients.")
    ] = None,
    page: Annotated[Path | None, typer.Option(help="Draw it as an HTML file too.")] = None,
    as_json: Json = False,
) -> None:
    """Plan a room for so many nodes: racks, power, switches, cables, storage, and where jobs go."""
    if facility is None:
        raise UsageError("plan wants to know how many nodes", fix="headway plan --facility 36")
    from headway.core.profile import Workload
    from headway.plan import facility as plans
    from headway.plan.facility_text import text

    known = None if workload is None else Workload.read(workload)
    encoded = None if known is None else known.input.encoded_bytes
    samples = None if known is None else known.run.samples
    image_bytes = plans.IMAGE_BYTES if image_kb is None and not encoded else encoded or 0.0
    if image_kb is not None:
        image_bytes = image_kb * 1e3
    data_bytes = data_gb * 1e9 if data_gb is not None else samples * encoded if samples and encoded else None
    wanted = plans.Wanted(
        nodes=facility,
        node=node,
        node_watts=None if node_kw is None else node_kw * 1e3,
        rack_watts=rack_kw * 1e3,
        ports=ports,
        oversubscription=oversubscription,
        leaf=leaf,
        core=core,
        images_s=images_s,
        image_bytes=image_bytes,
        data_bytes=data_bytes,
        samples=samples,
        pue=pue,
    )
    found = plans.facility(wanted)
    gradients = GRADIENT_MB * 1e6 if known is None else float(known.step.exchange.gradient_bytes)
    placed = None
    if jobs is not None:
        from headway.plan.placement import place, read_jobs

        placed = place(read_jobs(jobs, gradients), found.pods)
    if page is not None:
        from headway.plan import facility_page

        facility_page.write(found, page, placed)
        say(f"Wrote {page}.")
    result = found.to_json() | ({} if placed is None else {"placement": placed.to_json()})
    show(result, as_json, text(found, placed))
