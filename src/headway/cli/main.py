"""The command line. Each verb is a thin call into the library."""

from __future__ import annotations

import shlex
import shutil
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli import (
    dataset,
    ensemble,
    examine,
    export,
    index,
    interchange,
    loop,
    many,
    mine,
    planning,
    serve,
    serve_data,
    study,
    training,
)
from headway.cli.help import VerbWithGroups
from headway.cli.screen import LOG, Json, Overrides, Target, can_print, print_result
from headway.core.errors import HeadwayError, UsageError, UserCodeError
from headway.core.files import expect_writable
from headway.core.messages import show_messages
from headway.core.system_errors import expect_address_space, explain_system_error
from headway.core.text_format import format_bytes, pluralise

if TYPE_CHECKING:
    from headway.data.pack import PackResult

# Help is plain text, without rich's boxes. `main`, below, prints the errors, and typer does not.
app = typer.Typer(
    help="Train deep networks in less time.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# Exit status of typer after Ctrl-C.
CTRL_C_STATUS = 130

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing file or folder.")]


def _print_version(requested: bool) -> None:
    """Prints the version and exits. Typer calls it before it looks for a verb (`is_eager`)."""
    if requested:
        from headway import __version__

        print(f"headway {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Train deep networks in less time."""


def _quote(path: Path) -> str:
    """Quotes a path, so that the user can paste a command with it into a shell."""
    return shlex.quote(str(path))


@app.command()
def init(
    src: Annotated[
        str, typer.Argument(help="Folder CLASS/NAME.ext, CSV or JSONL of paths and labels, or a packed folder.")
    ],
    out: Annotated[Path | None, typer.Option(help="Recipe to write. Default: NAME.yaml.")] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Look at your images and write a recipe that fits them."""
    from headway.setup.propose import propose
    from headway.storage.addresses import parse_local_path

    # Only local images can be looked at: a URL is refused, and the message names the next step.
    path = parse_local_path(src, "Look at a local copy, and put the address under data.train of the recipe.")
    recipe, findings, packed = propose(path, out, overwrite=overwrite)
    for warning in findings.warnings:
        LOG.warning(warning)
    split = "" if findings.held_out else " --split 0.1"
    steps = [] if findings.packed else [f"headway pack {_quote(path)} {_quote(packed)}{split}"]
    steps.append(f"headway train {_quote(recipe)}")
    text = "\n  ".join([f"Wrote {recipe}. Next:", *steps])
    print_result(
        {"recipe": str(recipe), "packed": str(packed), "samples": findings.samples, "next": steps}, as_json, text
    )


@app.command()
def pack(
    src: Annotated[
        str | None,
        typer.Argument(
            help="Folder CLASS/NAME.ext (or train/ and eval/ of such), CSV, JSONL, a pack or its address, or foreign "
            "data."
        ),
    ] = None,
    dst: Annotated[str | None, typer.Argument(help="Folder to create.")] = None,
    form: Annotated[
        str | None,
        typer.Option("--format", help="Format: recordio, tar, lmdb or raw. Default: recordio; raw for pixels."),
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help="Mode: keep, seekable (default), resize=N,quality=Q, raw, or raw,resize=N.")
    ] = None,
    transform: Annotated[
        str | None, typer.Option(help="module:function or file.py:function, called with (image, label, name).")
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(help="Columns of a CSV or JSONL file to use: path,label, or path=file,label=species."),
    ] = None,
    orient: Annotated[bool, typer.Option("--orient", help="Rotate images by their EXIF orientation.")] = False,
    split: Annotated[float, typer.Option(help="Share of each class held out for evaluation, in DST/eval.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the split and of the order on disk.")] = 0,
    threads: Annotated[int | None, typer.Option(help="Decoding threads. Default: the number of usable cores.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out bad images and list them.")] = False,
    part: Annotated[
        str | None,
        typer.Option(metavar="K/N", help="Pack part K of N, on one of N machines, into DST.parts; then --join."),
    ] = None,
    join: Annotated[
        str | None, typer.Option(metavar="DST", help="Join the parts in DST.parts into DST; takes no SRC.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Pack images into shards with columns."""
    # Imports stand inside the verbs: torch takes seconds to load, and --help must not.
    if join is not None:
        from headway.data.pack_join import join_pack, suggest_join

        given = [src, dst, form, mode, transform, columns, threads, part]
        if orient or split or seed or skip_bad or any(value is not None for value in given):
            what = "--join takes the folder to create, and no other option than --overwrite"
            raise UsageError(what, fix=suggest_join(join, src, dst))
        _print_pack(join_pack(join, overwrite=overwrite), as_json, "Joined")
        return
    if src is None or dst is None:
        raise UsageError("the images or the folder to create are missing", fix="Write headway pack SRC DST.")
    from headway.core.sample_progress import SampleProgress
    from headway.data.pack import pack as pack_images
    from headway.data.pack_parts import describe_next_step
    from headway.data.pack_plan import PackPart

    pack_part = PackPart.parse(part) if part is not None else None
    with SampleProgress("Packing", "images") as progress:
        pack_result = pack_images(
            src,
            dst,
            format=form,
            mode=mode,
            transform=transform,
            columns=columns,
            orient=orient,
            split=split,
            seed=seed,
            threads=threads,
            skip_bad=skip_bad,
            overwrite=overwrite,
            part=(pack_part.index, pack_part.count) if pack_part else None,
            progress=progress,
        )
    _print_pack(pack_result, as_json, "Packed", describe_next_step(dst, pack_part) if pack_part else "")


def _print_pack(pack_result: PackResult, as_json: bool, verb: str, hint: str = "") -> None:
    """Prints the result of a pack or a join, and what to do next."""
    for note in pack_result.notes:
        LOG.info(note)
    for warning in pack_result.warnings:
        LOG.warning(warning)
    summary = {
        "folders": [str(folder) for folder in pack_result.folders],
        "format": pack_result.format,
        "mode": pack_result.mode,
        "samples": pack_result.samples,
        "counts": pack_result.counts,
        "left_out": pack_result.left_out,
        "bytes": pack_result.bytes,
        "skipped": pack_result.skipped,
        "warnings": pack_result.warnings,
        "seconds": pack_result.seconds,
    }
    print_result(summary, as_json, "\n".join(filter(None, [_describe_pack(pack_result, verb), hint])))


def _describe_pack(result: PackResult, verb: str) -> str:
    """Describes the result of a pack, for the terminal."""
    folders = ", ".join(str(folder) for folder in result.folders)
    # A join copies no image, so it has no rate.
    rate = f" at {result.samples / max(result.seconds, 1e-9):,.0f} images/s" if verb == "Packed" else ""
    size = f"{format_bytes(result.bytes)}, format {result.format}, mode {result.mode}"
    # Only a transform leaves samples out; bad images are counted apart, below.
    if result.left_out:
        size += f"; the transform left out {result.left_out:,}"
    text = f"{verb} {result.samples:,} images ({size}) into {folders}{rate}"
    if len(result.folders) > 1:
        sets = ", ".join(f"{path.name} {n:,}" for path, n in zip(result.folders, result.counts, strict=True))
        text += f": {sets} images" + (f", {len(result.classes):,} classes" if result.classes else "")
    text += "."
    if result.skipped:
        images = "image was left out; it is" if len(result.skipped) == 1 else "images were left out; they are"
        text += f"\n{len(result.skipped):,} bad {images} listed in {result.skipped_file}."
    return text


@app.command()
def verify(folder: Annotated[str, typer.Argument(help="A packed folder.")], as_json: Json = False) -> None:
    """Check every record of a packed folder.

    Name each damaged record, and leave with status 1 if there is one.
    """
    from headway.core.sample_progress import SampleProgress
    from headway.data.verify import verify as verify_folder

    with SampleProgress("Verifying", "records") as progress:
        verification = verify_folder(folder, progress)
    damages = verification.damages
    counts = [f"{count:,}" for count in verification.samples.values()]
    scope = f" of {len(counts)} sets" if len(counts) > 1 else ""
    lines = [
        *map(str, damages),
        f"{pluralise(len(damages), 'damaged place')}: pack the data again."
        if damages
        else f"Every record{scope} ({' + '.join(counts)} samples) is intact.",
    ]
    print_result({"damaged": [asdict(d) for d in damages], "samples": verification.samples}, as_json, "\n".join(lines))
    # Exit status 1 lets a script react to damage.
    if damages:
        raise typer.Exit(1)


app.command()(training.train)
app.command(cls=VerbWithGroups)(many.sweep)
app.command()(many.curve)


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder, an ensemble, or an export.")],
    data: Annotated[str | None, typer.Option(help="Packed folder. Default: the run's evaluation set.")] = None,
    target: Target = None,
    as_json: Json = False,
) -> None:
    """Evaluate the best weights of a run."""
    from headway.export.predictor import open_predictor

    with open_predictor(run, target=target) as predictor:
        metrics = predictor.evaluate(data)
    # Numbers of samples are not metrics; the text names them at its end.
    text = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items() if "samples" not in name)
    print_result(metrics, as_json, f"{text}  over {metrics['samples']:,.0f} images")


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="A run folder, an ensemble, or an export.")],
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders of them.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write, .csv or .jsonl. Default: CSV on standard output.")
    ] = None,
    top: Annotated[
        int | None, typer.Option(min=1, help="Number of best classes to write, each with its probability.")
    ] = None,
    target: Target = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out bad images and name them.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSONL instead of CSV.")] = False,
) -> None:
    """Predict image files with the best weights of a run."""
    from headway.data.image_files import list_image_files
    from headway.export.predictor import open_predictor
    from headway.training.prediction_rows import write_rows

    expect_writable(out)
    # Listed before the network is loaded: a wrong path is then refused at once.
    files = list_image_files(images)

    # Standard output holds the rows alone, so that bad images are named on standard error.
    def report_bad_image(error: HeadwayError) -> None:
        if not skip_bad:
            raise error
        LOG.warning(f"Left out {error.where}: {error.what}.")

    with open_predictor(run, target=target) as predictor:
        predictor.check_top(top)
        # A generator: rows are printed while others are computed, so `| head` can end the verb early.
        rows = predictor.predict(files, top=top, on_bad=report_bad_image)
        written = write_rows(rows, out, as_json)
    if written < len(files):
        LOG.warning(f"Left out {len(files) - written:,} of {len(files):,} files.")
    if out is not None:
        LOG.info(f"Wrote {written:,} rows to {out}.")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run folder, or the folder of a sweep.")],
    beside: Annotated[
        list[Path] | None, typer.Option(help="Another run to show in the chart of layer rates. May be repeated.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Write a page that compares the run with this one instead.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="With --against: page to write. Default: against-NAME.html in the run folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the report of a run or of a sweep as an HTML file.

    With --against, write a page that compares the run with another one instead.
    """
    if (run / "sweep.yaml").is_file():
        if beside or against or out:
            raise UsageError("the report of a sweep takes no options", fix="Leave --beside, --against and --out out.")
        from headway.sweep.page import write_page
        from headway.sweep.sweep_summary import summarise_sweep

        summary = summarise_sweep(run)
        page = write_page(summary)
        print_result(summary.to_json() | {"report": str(page)}, as_json, f"Report: {page}")
        return
    if against is not None:
        if beside:
            raise UsageError("--beside and --against cannot be combined", fix="Leave one of them out.")
        from headway.report import comparison_page
        from headway.report.comparison import compare_runs

        expect_writable(out)
        comparison = compare_runs(run, against)
        page = comparison_page.write_page(comparison, out)
        print_result(comparison.to_json() | {"report": str(page)}, as_json, f"{comparison.describe()}\nPage: {page}")
        return
    if out is not None:
        raise UsageError("--out only works with --against", fix="Add --against RUN, or leave it out.")
    from headway.report import run_report

    path = run_report.write_report(run, beside or ())
    print_result({"report": str(path)}, as_json, f"Report: {path}")


app.command()(ensemble.ensemble)
app.command()(export.export)
app.command()(serve.serve)
app.command()(serve_data.serve_data)
app.command()(serve_data.data_token)
app.add_typer(dataset.app, name="dataset")
app.add_typer(interchange.app, name="annotations")
app.command()(interchange.croissant)
app.command()(interchange.lineage)
app.command()(index.index)
app.command(cls=VerbWithGroups)(index.runs)
app.command(cls=VerbWithGroups)(mine.mine)
app.command()(loop.loop)
app.command()(study.landscape)
app.command()(study.assess)
app.command()(study.replay)
app.command()(examine.doctor)
app.command()(examine.tune)
app.command(cls=VerbWithGroups)(planning.plan)


@app.command()
def schedule(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe.")],
    overrides: Overrides = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Size of the training set. Default: read from the packed data.")
    ] = None,
    procs: Annotated[int, typer.Option(min=1, help="Processes of the run, for a batch per device.")] = 1,
    page: Annotated[Path | None, typer.Option(help="Also write an HTML page.")] = None,
    as_json: Json = False,
) -> None:
    """Draw the schedules of a run before it begins.

    The picture shows learning rate, momentum and batch.
    """
    from headway.core.files import write_atomically
    from headway.report import schedule_preview_page
    from headway.report.schedule_preview import build_preview

    expect_writable(page)
    preview = build_preview(recipe, overrides or (), samples, procs)
    for warning in preview.warnings:
        LOG.warning(warning)
    if page is not None:
        write_atomically(page, schedule_preview_page.render_preview(preview))
        LOG.info(f"Wrote {page}.")
    # Wider pictures are hard to read, and narrower terminals would break the lines.
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    result = preview.to_json() | {"page": page and str(page)}
    print_result(
        result,
        as_json,
        schedule_preview_page.format_preview(preview, width, blocks=can_print(schedule_preview_page.BLOCKS)),
    )


@app.command("bench-links")
def bench_links(
    procs: Annotated[
        int | None, typer.Option(help="Processes to start on this host, at least 2. Leave it out under a launcher.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time for the all-reduces of all sizes.")] = 60.0,
    interface: Annotated[
        str | None, typer.Option(help="Network interface between hosts, or several that share messages: eth0,eth1.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the links between ranks.

    Also measure the bandwidth of each all-reduce algorithm on them.
    """
    from headway.comm.bench_links import run_bench_links

    measurement = run_bench_links(procs, seconds, interface.split(",") if interface else ())
    # Under a launcher every rank runs this verb, and only rank 0 gets the result.
    if measurement is not None:
        print_result(asdict(measurement), as_json, measurement.to_text())


@cache
def build_command() -> Callable[..., Any]:
    """Builds the click command with all its verbs."""
    # Cached for tests that call it many times: it takes 0.06 s.
    return typer.main.get_command(app)


def main() -> None:
    """Runs the command line. An error is a sentence and an exit status; --debug also shows its traceback."""
    show_messages()
    # --debug is accepted before and after the verb, so typer never sees it.
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    try:
        expect_address_space("".join(sys.argv[1:2]))
        build_command()(prog_name="headway")
    except UserCodeError as error:
        cause = error.__cause__
        # The user's own code failed: they need the line, with or without --debug.
        if cause is not None:
            traceback.print_exception(cause, file=sys.stderr)
        _exit_with_error(error, error.exit_status, debug)
    except HeadwayError as error:
        _exit_with_error(error, error.exit_status, debug)
    # A full disk, a missing library or too little memory is no fault of Headway, so it gets a sentence. An
    # error without one is a fault of Headway, and its traceback is shown.
    except (OSError, MemoryError, RuntimeError, ImportError) as error:
        if (sentence := explain_system_error(error)) is None:
            raise
        _exit_with_error(sentence, 1, debug)
    except SystemExit as exit_request:
        # click takes an option of the script for one of its own.
        if exit_request.code == UsageError.exit_status and sys.argv[1:2] == ["assess"] and "--" not in sys.argv:
            LOG.error("Options of the script come after --: headway assess train.py --target-val 0.9 -- --lr 0.1.")
        if exit_request.code != CTRL_C_STATUS:
            raise
        # Exit status 1, as for every other run that did not finish.
        LOG.error("Stopped.")
        sys.exit(1)


def _exit_with_error(error: Exception, status: int, debug: bool) -> None:
    """Prints the sentence of an error, and exits with a status. The traceback is printed only if `debug` is set."""
    if debug:
        traceback.print_exc()
    LOG.error(f"headway: {error}")
    sys.exit(status)
