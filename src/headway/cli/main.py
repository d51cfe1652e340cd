"""The command line. Each verb is a thin call into the library."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli import examine, planning, study
from headway.cli.screen import Json, can_print, print_result, say
from headway.core.errors import HeadwayError, UsageError, UserCodeError
from headway.core.files import expect_writable
from headway.core.system_errors import expect_address_space, explain_system_error

if TYPE_CHECKING:
    from headway.train.runs import RunResult

app = typer.Typer(
    help="Train deep networks in less time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# Exit status of typer after Ctrl-C.
CTRL_C = 130

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing file or folder.")]


def _version(asked: bool) -> None:
    if asked:
        from headway import __version__

        print(f"headway {__version__}")
        raise typer.Exit


@app.callback()
def options(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Train deep networks in less time."""


def _quote(path: Path) -> str:
    """Quotes a path for a shell."""
    return shlex.quote(str(path))


@app.command()
def init(
    src: Annotated[
        str, typer.Argument(help="Folder CLASS/NAME.ext, CSV or JSONL of paths and labels, or a packed folder.")
    ],
    out: Annotated[Path | None, typer.Option(help="Recipe to write; default NAME.yaml.")] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Look at your images and write a recipe that fits them."""
    from headway.setup.propose import propose
    from headway.storage.addresses import parse_local_path

    path = parse_local_path(src, "Look at a local copy, and put the address under data.train of the recipe.")
    recipe, found, packed = propose(path, out, overwrite=overwrite)
    split = "" if found.held_out else " --split 0.1"
    steps = [] if found.packed else [f"headway pack {_quote(path)} {_quote(packed)}{split}"]
    steps.append(f"headway train {_quote(recipe)}")
    text = "\n  ".join([f"Wrote {recipe}. Next:", *steps])
    print_result({"recipe": str(recipe), "packed": str(packed), "samples": found.samples, "next": steps}, as_json, text)


@app.command()
def pack(
    src: Annotated[
        str,
        typer.Argument(
            help="Folder CLASS/NAME.ext (or train/ and eval/ of such), CSV, JSONL, a pack or its address, or foreign "
            "data."
        ),
    ],
    dst: Annotated[str, typer.Argument(help="Folder to create.")],
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
    orient: Annotated[bool, typer.Option("--orient", help="Rotate images by their EXIF orientation.")] = False,
    split: Annotated[float, typer.Option(help="Share of each class held out for evaluation, in DST/eval.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the split and of the order on disk.")] = 0,
    threads: Annotated[int | None, typer.Option(help="Decoding threads; default: the usable cores.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out bad images and list them.")] = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Pack images into shards with columns."""
    from headway.core.sample_progress import SampleProgress
    from headway.data.pack import pack as run

    with SampleProgress("Packing", "images") as progress:
        packed = run(
            src,
            dst,
            format=form,
            mode=mode,
            transform=transform,
            orient=orient,
            split=split,
            seed=seed,
            threads=threads,
            skip_bad=skip_bad,
            overwrite=overwrite,
            progress=progress,
        )
    folders = ", ".join(str(folder) for folder in packed.folders)
    rate = packed.samples / max(packed.seconds, 1e-9)
    made = f"{packed.bytes / 1e6:,.1f} MB, format {packed.format}, mode {packed.mode}"
    if packed.left_out:
        made += f"; the transform left out {packed.left_out:,}"
    text = f"Packed {packed.samples:,} images ({made}) into {folders} at {rate:,.0f} images/s"
    if len(packed.folders) > 1:
        parts = ", ".join(f"{path.name} {n:,}" for path, n in zip(packed.folders, packed.counts, strict=True))
        text += f": {parts} images" + (f", {len(packed.classes):,} classes" if packed.classes else "")
    text += "."
    for note in packed.notes:
        say(note)
    if packed.skipped:
        some = "image was left out; it is" if len(packed.skipped) == 1 else "images were left out; they are"
        text += f"\n{len(packed.skipped):,} bad {some} listed in {packed.skipped_file}."
    result = {
        "folders": [str(folder) for folder in packed.folders],
        "format": packed.format,
        "mode": packed.mode,
        "samples": packed.samples,
        "counts": packed.counts,
        "left_out": packed.left_out,
        "bytes": packed.bytes,
        "skipped": packed.skipped,
        "seconds": packed.seconds,
    }
    print_result(result, as_json, text)


@app.command()
def verify(folder: Annotated[str, typer.Argument(help="A packed folder.")], as_json: Json = False) -> None:
    """Check every record of a packed folder and name the damaged ones."""
    from headway.core.sample_progress import SampleProgress
    from headway.data.verify import verify as run

    with SampleProgress("Verifying", "records") as progress:
        found = run(folder, progress)
    damages, counts = found.damages, [f"{count:,}" for count in found.samples.values()]
    of = f" of {len(counts)} parts" if len(counts) > 1 else ""
    lines = [
        *map(str, damages),
        f"{len(damages)} damaged place{'s'[: len(damages) > 1]}: pack the data again."
        if damages
        else f"Every record{of} ({' + '.join(counts)} samples) is intact.",
    ]
    print_result({"damaged": [asdict(d) for d in damages], "samples": found.samples}, as_json, "\n".join(lines))
    if damages:
        raise typer.Exit(1)


@app.command()
def train(
    recipe: Annotated[Path | None, typer.Argument(help="A YAML recipe.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="key=value", help="Override recipe values, for example batch=128.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--run", "--run-folder", help="Run folder to create; default runs/NAME.")
    ] = None,
    repeat: Annotated[
        int, typer.Option(min=1, help="Number of trainings, with seeds s, s+1, ...; prints mean and interval.")
    ] = 1,
    resume: Annotated[Path | None, typer.Option(help="Resume the run in this folder.")] = None,
    procs: Annotated[
        int | None, typer.Option(min=1, help="Number of processes. A lost process costs a step and is replaced.")
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(help="Hosts of the processes, for example a:4,b:4, reached by ssh. Default: this host."),
    ] = None,
    respawn: Annotated[
        bool | None, typer.Option(help="With --procs or --hosts: replace lost processes. Default: yes.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build everything, print its cost and memory, and train nothing.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="With --dry-run: JSON workload to write; default NAME.workload.json.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="With --dry-run: size of a training set that may be absent.")
    ] = None,
    classes: Annotated[int | None, typer.Option(min=2, help="With --samples: number of classes; default 1000.")] = None,
    eval_samples: Annotated[int | None, typer.Option(min=1, help="With --samples: size of the evaluation set.")] = None,
    as_json: Json = False,
) -> None:
    """Train a recipe into a run folder, or resume a run."""
    plan: dict[str, Any] = {"out": out, "samples": samples, "classes": classes, "eval_samples": eval_samples}
    if dry_run:
        if resume is not None or folder is not None or repeat > 1 or respawn is not None:
            fix = "headway train RECIPE --dry-run [--procs N] [--hosts a:4,b:4] [--samples N --classes K] [--out FILE]"
            raise UsageError("--run, --resume, --repeat and --respawn cannot be combined with --dry-run", fix=fix)
        if recipe is None:
            raise UsageError("train needs a recipe", fix="headway train RECIPE --dry-run.")
        _dry_run(recipe, overrides or (), as_json, procs=procs, hosts=hosts, **plan)
        return
    if any(value is not None for value in plan.values()):
        fix = "Add --dry-run, or leave them out."
        raise UsageError("--out, --samples, --classes and --eval-samples only work with --dry-run", fix=fix)
    if resume is not None and (recipe is not None or folder is not None or repeat > 1):
        fix = "A run continues with the recipe that it began with: headway train --resume RUN."
        raise UsageError("a recipe, --run and --repeat cannot be combined with --resume", fix=fix)
    if resume is None and recipe is None:
        raise UsageError("train needs a recipe", fix="headway train RECIPE, or headway train --resume RUN.")
    if procs is not None or hosts is not None:
        if repeat > 1:
            fix = "Leave --procs out, or repeat with seed=1, seed=2."
            raise UsageError("--repeat trains in one process and cannot be combined with --procs", fix=fix)
        target = {"recipe": recipe, "overrides": overrides or (), "folder": folder, "resume": resume}
        _train_on_ranks(target, as_json, procs=procs, hosts=hosts, respawn=respawn is not False)
        return
    if respawn is not None:
        fix = "Name --procs or --hosts too, or leave it out."
        raise UsageError(f"--{'no-' * (not respawn)}respawn only works with --procs or --hosts", fix=fix)
    # Under another launcher torch would print C++ stacks on every rank when one is lost.
    if "RANK" in os.environ:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from headway.train import runs

    if resume is not None:
        _print_run(runs.resume(resume, say=say), as_json)
    elif recipe is not None and repeat == 1:
        _print_run(runs.train(recipe, overrides or (), folder, say=say), as_json)
    elif recipe is not None:
        _print_repeats(runs.repeat(recipe, overrides or (), folder, repeat, say=say), as_json)


def _train_on_ranks(target: dict[str, Any], as_json: bool, **ranks: Any) -> None:
    """Trains with Headway's launcher, and exits with its status."""
    from headway.train import distributed
    from headway.train.runs import find_finished_run

    if (resume := target["resume"]) is not None and (done := find_finished_run(resume, say=say)) is not None:
        _print_run(done, as_json)
        return
    options = ["--json"] if as_json else []
    raise typer.Exit(distributed.train_on_ranks(*target.values(), **ranks, options=options))


def _print_repeats(ended: Sequence[RunResult], as_json: bool) -> None:
    """Prints mean and 95 % interval over runs with several seeds."""
    from headway.train import runs

    rows = {}
    metrics = [name for name in ended[0].summary.get("best") or () if name not in ("step", "epoch")]
    for name in (*metrics, "seconds", "images_s", "seconds_to_reach"):
        found = [run.summary | run.summary.get("stop_at", {}) for run in ended]
        values = [one[name] for one in found if one.get(name) is not None]
        # A goal that some runs did not reach has no mean.
        if len(values) == len(ended):
            rows[name] = runs.compute_interval(values)
    lines = [f"{name:<10} {mean:.5g} +- {half:.2g}" for name, (mean, half) in rows.items()]
    text = "\n".join([f"{len(ended)} runs in {ended[0].run.folder.parent}; mean and 95 % interval:", *lines])
    result = {name: {"mean": mean, "interval": half} for name, (mean, half) in rows.items()}
    print_result({"runs": [str(run.run.folder) for run in ended], **result}, as_json, text)
    if any(run.was_interrupted for run in ended):
        raise typer.Exit(1)


def _dry_run(
    recipe: Path, overrides: Sequence[str], as_json: bool, *, out: Path | None, eval_samples: int | None, **options: Any
) -> None:
    from headway.report.dry_run_text import format_dry_run
    from headway.train.dry_run import dry_run

    expect_writable(out)
    found = dry_run(recipe, overrides, say=say, evaluation_samples=eval_samples, **options)
    out = out or Path(f"{found.workload.name}.workload.json")
    found.workload.write(out)
    print_result(found.to_json() | {"written": str(out)}, as_json, f"{format_dry_run(found)}\n\nWrote {out}.")


def _print_run(ended: RunResult, as_json: bool) -> None:
    summary, folder = ended.summary, ended.run.folder
    if ended.was_interrupted:
        text = f"Stopped at step {summary['step']} of {summary['steps']}; resume with: {ended.run.resume_command}"
    else:
        best = dict(summary.get("best") or {})
        step, _ = best.pop("step", summary["step"]), best.pop("epoch", None)
        known = [f"{name} {summary[name]:.4f}" for name in best]
        text = "  ".join(
            [f"Trained {folder}:", *known, f"{summary['seconds']:.1f} s", f"{summary['images_s']:,.0f} images/s"]
        )
        if step != summary["step"]:
            kept = ", ".join(f"{name} {value:.4f}" for name, value in best.items())
            text += f"\nThe run keeps the best weights, those of step {step:,}: {kept}"
        if summary["damaged_samples"]:
            text += (
                f"\nDamaged samples occurred {summary['damaged_samples']:,} times: see {folder / 'quarantine.jsonl'}."
            )
        reached = summary.get("stop_at")
        if reached:
            goal = ", ".join(f"{name} {value}" for name, value in reached["goal"].items())
            took = reached["seconds_to_reach"]
            text += f"\n{goal} " + (f"after {took:.1f} s" if took else "was not reached")
            text += f" (the clock leaves out {summary['clock_excludes']})"
    if ended.is_lead:
        print_result({"run": str(folder), **summary}, as_json, text)
    if ended.was_interrupted:
        raise typer.Exit(1)


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    data: Annotated[str | None, typer.Option(help="Packed folder; default: the run's evaluation set.")] = None,
    as_json: Json = False,
) -> None:
    """Evaluate the best weights of a run."""
    from headway.train import runs

    metrics = runs.evaluate(run, data, say=say)
    text = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items() if "samples" not in name)
    print_result(metrics, as_json, f"{text}  over {metrics['samples']:,.0f} images")


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders of them.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write, .csv or .jsonl. Default: CSV on standard output.")
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out bad images and name them.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSONL instead of CSV.")] = False,
) -> None:
    """Predict image files with the best weights of a run."""
    from headway.core.run_folder import RunFolder
    from headway.train import runs
    from headway.train.predict import list_image_files, write_rows
    from headway.train.predict import predict as rows_of

    expect_writable(out)
    files = list_image_files(images)

    def bad(error: HeadwayError) -> None:
        if not skip_bad:
            raise error
        say(f"Left out {error.where}: {error.what}.")

    rows = rows_of(runs.load_trained(RunFolder.open(run), say=say), files, on_bad=bad)
    written = write_rows(rows, out, as_json)
    if written < len(files):
        say(f"Left out {len(files) - written:,} of {len(files):,} files.")
    if out is not None:
        say(f"Wrote {written:,} rows to {out}.")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    beside: Annotated[
        list[Path] | None, typer.Option(help="Another run for the chart of layer rates; may be repeated.")
    ] = None,
    against: Annotated[Path | None, typer.Option(help="Another run: write a page that compares both instead.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="With --against: page to write; default against-NAME.html in the run folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the report of a run, or a comparison with another run, as one HTML file."""
    if against is not None:
        if beside:
            raise UsageError("--beside and --against cannot be combined", fix="Leave one of them out.")
        from headway.report import comparison_page
        from headway.report.comparison import compare_runs

        expect_writable(out)
        found = compare_runs(run, against)
        page = comparison_page.write_page(found, out)
        print_result(found.to_json() | {"report": str(page)}, as_json, f"{found.describe()}\nPage: {page}")
        return
    if out is not None:
        raise UsageError("--out only works with --against", fix="Add --against RUN, or leave it out.")
    from headway.report import run_report

    path = run_report.write_report(run, beside or ())
    print_result({"report": str(path)}, as_json, f"Report: {path}")


app.command()(study.landscape)
app.command()(study.assess)
app.command()(examine.doctor)
app.command()(examine.tune)
app.command()(planning.plan)


@app.command()
def schedule(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="key=value", help="Override recipe values, for example batch=128.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Size of the training set; default: read from the packed data.")
    ] = None,
    page: Annotated[Path | None, typer.Option(help="Also write an HTML page.")] = None,
    as_json: Json = False,
) -> None:
    """Draw learning rate, momentum and batch over a run before it begins."""
    from headway.core.files import write_atomically
    from headway.report import schedule_preview_page
    from headway.report.schedule_preview import build_preview

    expect_writable(page)
    found = build_preview(recipe, overrides or (), samples)
    for warning in found.warnings:
        say(warning)
    if page is not None:
        write_atomically(page, schedule_preview_page.render_preview(found))
        say(f"Wrote {page}.")
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    result = found.to_json() | {"page": page and str(page)}
    print_result(
        result,
        as_json,
        schedule_preview_page.format_preview(found, width, blocks=can_print(schedule_preview_page.BLOCKS)),
    )


@app.command("bench-links")
def bench_links(
    procs: Annotated[
        int | None, typer.Option(help="Processes to start on this host, at least 2; leave it out under a launcher.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time for the all-reduces of all sizes.")] = 60.0,
    as_json: Json = False,
) -> None:
    """Measure the links between ranks, and the bandwidth of each algorithm."""
    from headway.comm.bench_links import run_bench_links

    found = run_bench_links(procs, seconds)
    if found is not None:
        print_result(asdict(found), as_json, found.to_text())


@cache
def build_command() -> Callable[..., Any]:
    """Builds the command with all its verbs."""
    # Cached for tests that call it many times: it takes 0.06 s.
    return typer.main.get_command(app)


def main() -> None:
    """Runs the command line. An error is a sentence and an exit status; --debug also shows its traceback."""
    # Accepted before and after the verb.
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    try:
        expect_address_space("".join(sys.argv[1:2]))
        build_command()(prog_name="headway")
    except UserCodeError as error:
        cause = error.__cause__
        # The user's own code failed: they need the line.
        if cause is not None:
            traceback.print_exception(cause, file=sys.stderr)
        _fail(error, error.exit_status, debug)
    except HeadwayError as error:
        _fail(error, error.exit_status, debug)
    except (OSError, MemoryError, RuntimeError, ImportError) as error:
        if (sentence := explain_system_error(error)) is None:
            raise
        _fail(sentence, 1, debug)
    except SystemExit as left:
        if left.code == UsageError.exit_status and sys.argv[1:2] == ["assess"] and "--" not in sys.argv:
            say("Options of the script come after --: headway assess train.py --target-val 0.9 -- --lr 0.1.")
        if left.code != CTRL_C:
            raise
        say("Stopped.")
        sys.exit(1)


def _fail(error: Exception, status: int, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    say(f"headway: {error}")
    sys.exit(status)
