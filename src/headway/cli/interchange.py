"""The verbs `annotations`, `croissant` and `lineage`: labels of other programs, and descriptions for them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.screen import LOG, Json, print_result
from headway.core.errors import UsageError
from headway.core.files import expect_writable, write_atomically

_FORMATS = "coco, cvat, label-studio or list"

app = typer.Typer(
    help="Convert labels and boxes of COCO, CVAT, Label Studio and lists.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

From = Annotated[
    str | None, typer.Option("--from", metavar="FORMAT", help=f"Format of SRC: {_FORMATS}. Default: by its ending.")
]
Field = Annotated[
    str | None, typer.Option(metavar="NAME", help="Label Studio: the field of choices that holds the labels.")
]


# Typer reads the options from the signature.
@app.command()
def convert(
    src: Annotated[Path, typer.Argument(help="File of annotations.")],
    dst: Annotated[Path, typer.Argument(help="File to write: .json, .xml, .csv or .jsonl.")],
    source: From = None,
    target: Annotated[
        str | None, typer.Option("--to", metavar="FORMAT", help=f"Format of DST: {_FORMATS}. Default: by its ending.")
    ] = None,
    images: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder of the images; reads their sizes and SHA-256.")
    ] = None,
    field: Field = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    as_json: Json = False,
) -> None:
    """Convert a file of annotations into another format."""
    from headway.lifecycle.interchange.convert import convert_annotations

    done = convert_annotations(src, dst, source=source, target=target, images=images, field=field, overwrite=overwrite)
    text = f"Wrote {dst} ({done.target}). {done.annotations.describe()}."
    if done.target == "list":
        columns = f" --columns {done.packable_columns}" if done.packable_columns else ""
        text += f"\nNext: headway pack {shlex.quote(str(dst))} FOLDER{columns}"
    for note in done.notes:
        LOG.warning(note)
    print_result({**done.to_json(), "file": str(dst)}, as_json, text)


@app.command()
def export(
    address: Annotated[
        str, typer.Argument(help="A version, store:NAME@VERSION, or a split, store:NAME@VERSION/SPLIT.")
    ],
    dst: Annotated[Path, typer.Argument(help="File to write: .json, .xml, .csv or .jsonl.")],
    target: Annotated[
        str | None, typer.Option("--to", metavar="FORMAT", help=f"Format of DST: {_FORMATS}. Default: by its ending.")
    ] = None,
    images: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Also write the images into this folder.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
    as_json: Json = False,
) -> None:
    """Write the labels, boxes and splits of a version into a file of annotations."""
    from headway.core.sample_progress import SampleProgress
    from headway.lifecycle.interchange.store_exchange import export_version

    with SampleProgress("Writing", "images", LOG) as progress:
        done = export_version(address, dst, target=target, images=images, overwrite=overwrite, progress=progress)
    for note in done.notes:
        LOG.warning(note)
    text = f"Wrote {dst} ({done.target}). {done.annotations.describe()}."
    if images is not None:
        text += f"\nWrote {done.images:,} of the images to {images}; the others were there."
    print_result({**done.to_json(), "file": str(dst)}, as_json, text)


@app.command()
def show(
    src: Annotated[Path, typer.Argument(help="File of annotations.")],
    source: From = None,
    field: Field = None,
    as_json: Json = False,
) -> None:
    """Show what is in a file of annotations: images, labels, boxes and classes."""
    from headway.lifecycle.interchange.convert import read_annotations

    found = read_annotations(src, source, field=field)
    for note in found.notes:
        LOG.warning(note)
    labels, boxes = found.count_classes()
    rows = [f"  {name}: {labels[name]:,} labels, {boxes[name]:,} boxes" for name in found.classes]
    result = {**found.count(), "format": found.source, "labels": labels, "boxes_by_class": boxes}
    result["notes"] = list(found.notes)
    print_result(result, as_json, "\n".join([f"{src} ({found.source}). {found.describe()}.", *rows]))


# Typer reads the options from the signature.
def croissant(
    pack: Annotated[
        str,
        typer.Argument(help="A packed folder, one with the packs train and eval, or a version: store:NAME@VERSION."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="File to write. Default: croissant.json in the pack; needed for a version.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the data set.")] = None,
    description: Annotated[str | None, typer.Option(help="What it holds, in a sentence or more.")] = None,
    license: Annotated[str | None, typer.Option(metavar="URL", help="Address of its licence.")] = None,
    creator: Annotated[str | None, typer.Option(help="Person or organisation that made it.")] = None,
    url: Annotated[str | None, typer.Option(help="Address of its page.")] = None,
    published: Annotated[
        str | None, typer.Option(metavar="DATE", help="Date of publication, YYYY-MM-DD. Default: today.")
    ] = None,
    version: Annotated[
        str | None,
        typer.Option(help="MAJOR.MINOR.PATCH. Default: that of the description that is there; else 1.0.0."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Describe a packed data set in Croissant 1.1.

    Writes croissant.json, and samples.csv with a row for each image. What you said once is taken from there again.
    """
    from headway.core.sample_progress import SampleProgress
    from headway.lifecycle.interchange.croissant_files import summarise, write_croissant

    with SampleProgress("Hashing", "images", LOG) as progress:
        result = write_croissant(
            pack,
            out,
            name=name,
            description=description,
            license=license,
            creator=creator,
            url=url,
            published=published,
            version=version,
            progress=progress,
        )
    for note in result.notes:
        LOG.warning(note)
    text = f"Wrote {result.description} and {result.samples_file}: {result.samples:,} images, version "
    print_result(summarise(result), as_json, f"{text}{result.facts.version}.")


def lineage(
    target: Annotated[Path, typer.Argument(help="A run folder, an ensemble, an export, or a file of weights.")],
    runs: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Runs among which a file of weights is looked for.")
    ] = Path("runs"),
    events: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write OpenLineage events, one a line.")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="With --events: namespace of the jobs. Default: headway.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show where weights come from: runs, parents, data sets, and who set their labels."""
    from headway.lifecycle.interchange.lineage import describe_lineage, trace_lineage

    expect_writable(events)
    if namespace is not None and events is None:
        raise UsageError("--namespace only works with --events", fix="Add --events FILE, or leave it out.")
    found = trace_lineage(target, runs)
    text = describe_lineage(found)
    if events is not None:
        from headway.lifecycle.interchange.open_lineage import NAMESPACE, render_events

        write_atomically(events, render_events(found, namespace or NAMESPACE))
        text += f"\nEvents: {events}"
    print_result(found.to_json() | {"events": events and str(events)}, as_json, text)
