"""The verbs `headway dataset ...`: data sets with versions in a store."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headway.cli.screen import LOG, Json, print_result
from headway.core.errors import UsageError

if TYPE_CHECKING:
    from headway.lifecycle.store.any_store import AnyStore, Changed
    from headway.lifecycle.store.records import Change
    from headway.lifecycle.store.store import Store

app = typer.Typer(
    help="Keep data sets with versions in a store.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Folder = Annotated[
    str | None,
    typer.Option("--store", help="Folder of the store, or URL of a data service. Default: $HEADWAY_STORE."),
]
By = Annotated[str | None, typer.Option("--by", help="Who makes the change. Default: you.")]
Message = Annotated[str, typer.Option("--message", "-m", help="Why, for the log.")]
Expect = Annotated[
    str | None, typer.Option("--expect", metavar="VERSION", help="Refuse if another version is the newest one.")
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the data set.")]
Address = Annotated[str, typer.Argument(metavar="NAME@VERSION", help="A version: number, tag or ID. Default: newest.")]

_MAX_LISTED = 20


# Typer reads the options from the signatures.
@app.command()
def create(
    name: Name,
    store: Folder = None,
    shards: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Where a new store keeps its images, such as s3://bucket/cars."),
    ] = None,
    mode: Annotated[str, typer.Option(help="How images are stored: keep, seekable, or resize=N,quality=Q.")] = "keep",
    splits: Annotated[
        str | None, typer.Option(metavar="SPLIT=SHARE,...", help="Splits. Default: train=0.9,eval=0.1.")
    ] = None,
    classes: Annotated[
        str | None, typer.Option(metavar="CLASS,...", help="The only classes that labels may have. Default: any.")
    ] = None,
    start: Annotated[
        str | None, typer.Option("--from", metavar="NAME@VERSION", help="Begin with the samples of a version.")
    ] = None,
    description: Annotated[str, typer.Option(help="What the images show, for exports.")] = "",
    license: Annotated[str, typer.Option(help="Licence of the images, for exports.")] = "",
    creator: Annotated[str, typer.Option(help="Who made the images, for exports.")] = "",
    url: Annotated[str, typer.Option(help="Page about the images, for exports.")] = "",
    by: By = None,
    message: Message = "",
    as_json: Json = False,
) -> None:
    """Create a data set, and the folder of the store if there is none."""
    from headway.lifecycle.service.served_store import open_store

    given = {"description": description, "license": license, "creator": creator, "url": url}
    version = open_store(store, create=True, shards=shards).create(
        name,
        mode=mode,
        splits=_parse_splits(splits),
        classes=None if classes is None else [one.strip() for one in classes.split(",")],
        start=start,
        about={key: text for key, text in given.items() if text},
        by=by,
        message=message,
    )
    more = "" if store is None else f" --store {shlex.quote(str(store))}"
    text = f"Created {version.address} ({version.version[:12]}). Next: headway dataset add {name} IMAGES{more}"
    print_result(version.to_json(), as_json, text)


@app.command()
def add(
    name: Name,
    source: Annotated[
        str,
        typer.Argument(
            metavar="IMAGES",
            help="Folder CLASS/NAME.ext, CSV, JSONL, a file of COCO, CVAT or Label Studio, a pack, or foreign data.",
        ),
    ],
    store: Folder = None,
    prefix: Annotated[str, typer.Option(help="Put before each name, such as `monday/`.")] = "",
    split: Annotated[str, typer.Option(help="Split of all images. Default: the hash of each name says.")] = "",
    unlabelled: Annotated[
        bool, typer.Option("--unlabelled", help="Take all image files of a folder, without labels.")
    ] = False,
    ignore_near_copies: Annotated[
        bool,
        typer.Option("--ignore-near-copies", help="Do not look for near copies, so that no image is decoded."),
    ] = False,
    images: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder that names in a file start from. Default: that of the file."),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option("--from", metavar="FORMAT", help="Format of a file: coco, cvat, label-studio or list."),
    ] = None,
    field: Annotated[
        str | None, typer.Option(metavar="NAME", help="Label Studio: the field of choices that holds the labels.")
    ] = None,
    expect: Expect = None,
    by: By = None,
    message: Message = "",
    as_json: Json = False,
) -> None:
    """Add images, as a new version.

    Images whose bytes are there already are counted and left out; others that cannot be added are named. A near copy
    of an image goes to the split of that one.
    """
    from headway.core.sample_progress import SampleProgress
    from headway.lifecycle.interchange.store_exchange import add_annotations, is_annotation_file
    from headway.lifecycle.store.store import Store

    opened, name = _open(store, name)
    expected = _find_expected(opened, name, expect)
    is_file = form is not None or is_annotation_file(source)
    of_files = {"images": images, "from": form, "field": field}
    if given := [option for option, value in of_files.items() if value is not None and not is_file]:
        fix = "Leave it out, or name a file of annotations."
        raise UsageError(
            f"--{given[0]} belongs to files of annotations, and this is another source", where=source, fix=fix
        )
    if is_file and unlabelled:
        what = "--unlabelled takes a folder: images without a label in a file are added without one anyway"
        raise UsageError(what, where=source, fix="Leave it out, or name the folder of the images.")
    notes: tuple[str, ...] = ()
    outcome: Changed
    with SampleProgress("Adding", "images" if isinstance(opened, Store) else "bytes", LOG) as progress:
        common: dict[str, Any] = {"prefix": prefix, "split": split, "by": by, "message": message}
        common |= {"expected": expected, "progress": progress, "ignore_near_copies": ignore_near_copies}
        if is_file:
            path = Path(source)
            outcome, notes = add_annotations(opened, name, path, source=form, images=images, field=field, **common)
        else:
            outcome = opened.add(name, source, unlabelled=unlabelled, **common)
    for note in notes:
        LOG.warning(note)
    _print_outcome(opened, name, outcome, as_json)


@app.command()
def label(
    name: Name,
    labels: Annotated[
        list[str] | None, typer.Argument(metavar="SAMPLE=LABEL", help="Name or ID; an empty label takes it away.")
    ] = None,
    list_file: Annotated[
        Path | None, typer.Option("--list", help="CSV or JSONL with columns name (or sample) and label.")
    ] = None,
    store: Folder = None,
    expect: Expect = None,
    by: By = None,
    message: Message = "",
    as_json: Json = False,
) -> None:
    """Set labels, as a new version; no image is copied."""
    from headway.lifecycle.store.label_list import read_labels

    changes = [_parse_label(text) for text in labels or ()]
    changes += read_labels(list_file) if list_file is not None else []
    if not changes:
        fix = "Write SAMPLE=LABEL, or name a list with --list."
        if list_file is not None:
            fix = f"Set the column label in {list_file}."
        raise UsageError("no label is given", fix=fix)
    opened, name = _open(store, name)
    expected = _find_expected(opened, name, expect)
    _print_outcome(
        opened, name, opened.apply(name, changes, by=by, message=message or "label", expected=expected), as_json
    )


@app.command()
def remove(
    name: Name,
    samples: Annotated[list[str] | None, typer.Argument(metavar="SAMPLE", help="Names or IDs of samples.")] = None,
    list_file: Annotated[Path | None, typer.Option("--list", help="CSV or JSONL with a column name or sample.")] = None,
    store: Folder = None,
    expect: Expect = None,
    by: By = None,
    message: Message = "",
    as_json: Json = False,
) -> None:
    """Remove samples, as a new version; old versions keep them."""
    from headway.lifecycle.store.label_list import read_samples
    from headway.lifecycle.store.steps import remove_sample

    names = [*(samples or ()), *(read_samples(list_file) if list_file is not None else ())]
    if not names:
        raise UsageError("no sample is named", fix="Name samples, or a list with --list.")
    opened, name = _open(store, name)
    expected = _find_expected(opened, name, expect)
    changes = [remove_sample(one) for one in names]
    _print_outcome(
        opened, name, opened.apply(name, changes, by=by, message=message or "remove", expected=expected), as_json
    )


@app.command()
def log(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Data set. Default: list all of them.")] = None,
    store: Folder = None,
    as_json: Json = False,
) -> None:
    """List the versions of a data set, the newest first."""
    from headway.lifecycle.store.summary import describe_log

    if name is None:
        newest = _open(store, "")[0].list_datasets()
        lines = [f"{one.address}  {one.version[:12]}  {one.by}: {one.message}" for one in newest.values()]
        text = "\n".join(lines) or "The store has no data set. Create one: headway dataset create NAME"
        print_result([one.to_json() for one in newest.values()], as_json, text)
        return
    opened, name = _open(store, name)
    versions = opened.log(name)
    print_result([one.to_json() for one in versions], as_json, describe_log(versions))


@app.command()
def show(
    address: Address,
    store: Folder = None,
    samples: Annotated[bool, typer.Option("--samples", help="List the samples instead of counts.")] = False,
    setters: Annotated[bool, typer.Option("--setters", help="Count who set the labels instead.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a version holds."""
    opened, address = _open(store, address)
    if samples and setters:
        raise UsageError("--samples and --setters cannot be combined", fix="Leave one of them out.")
    if samples:
        for one in opened.list_samples(address):
            print_result(one.to_json(), as_json, one.describe())
        return
    if setters:
        counts = _expect_folder(opened, "show --setters").count_setters(address)
        text = "\n".join(f"{by}: {count:,}" for by, count in counts.items()) or "No sample has a label."
        print_result(counts, as_json, text)
        return
    summary = opened.summarise(address)
    print_result(summary.to_json(), as_json, summary.describe())


@app.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="OLD", help="A version, such as cars@v1.")],
    second: Annotated[str, typer.Argument(metavar="NEW", help="A version, such as cars@v2.")],
    store: Folder = None,
    as_json: Json = False,
) -> None:
    """Show what differs between two versions."""
    opened, first = _open(store, first)
    found = opened.diff(first, second)
    lines = [f"+ {one.name} ({one.label or 'no label'}, {one.split})" for one in found.added]
    lines += [f"- {one.name} ({one.label or 'no label'}, {one.split})" for one in found.removed]
    for before, after in found.changed:
        facts = [
            f"{getattr(before, key) or 'no label'} -> {getattr(after, key) or 'no label'}"
            for key in ("name", "label", "split")
            if getattr(before, key) != getattr(after, key)
        ]
        facts += ["other annotations"] if before.annotations != after.annotations else []
        if after.label is None and before.planned_split != after.planned_split:
            facts.append(f"then {after.planned_split or 'where its name says'}")
        lines.append(f"* {before.name}: {', '.join(facts)}")
    more = [f"and {len(lines) - _MAX_LISTED:,} more; --json lists all"] if len(lines) > _MAX_LISTED else []
    counts = ", ".join(f"{count:,} {kind}" for kind, count in found.counts.items() if count) or "No difference"
    print_result(found.to_json(), as_json, "\n".join([*lines[:_MAX_LISTED], *more, f"{counts}."]))


@app.command()
def merge(
    name: Name,
    other: Annotated[str, typer.Argument(metavar="OTHER", help="Version to merge, such as cars-by-anna.")],
    store: Folder = None,
    prefer: Annotated[
        str | None, typer.Option(metavar="ours|theirs", help="Side that wins where both changed a sample.")
    ] = None,
    expect: Expect = None,
    by: By = None,
    message: Message = "",
    as_json: Json = False,
) -> None:
    """Merge another version's changes.

    Samples that both sides changed in different ways are listed, and nothing is merged.
    """
    if prefer not in (None, "ours", "theirs"):
        raise UsageError(f"{prefer!r} is no side", where="--prefer", fix="Choose ours or theirs.")
    side: Literal["ours", "theirs"] | None = "ours" if prefer == "ours" else "theirs" if prefer else None
    found, name = _open(store, name)
    opened = _expect_folder(found, "merge")
    expected = _find_expected(opened, name, expect)
    _print_outcome(
        opened, name, opened.merge(name, other, prefer=side, by=by, message=message, expected=expected), as_json
    )


@app.command()
def tag(
    address: Address,
    tag: Annotated[str, typer.Argument(metavar="TAG", help="Name for the version, such as gold.")],
    store: Folder = None,
    replace: Annotated[bool, typer.Option("--replace", help="Move a tag that is there.")] = False,
    as_json: Json = False,
) -> None:
    """Give a version a name of its own."""
    opened, address = _open(store, address)
    version = _expect_folder(opened, "tag").tag(address, tag, replace=replace)
    text = f"{version.address} ({version.version[:12]}) is store:{version.dataset}@{tag} now."
    print_result(version.to_json(), as_json, text)


@app.command()
def gc(
    store: Folder = None,
    keep: Annotated[
        int | None, typer.Option(help="Also remove all but the newest N versions of each data set, and tagged ones.")
    ] = None,
    grace_hours: Annotated[float, typer.Option(min=0, help="Leave what is younger.")] = 24.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    moved: Annotated[
        bool, typer.Option("--moved", help="Shards at an address: this copy of the store is the only one now.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Remove files that no version needs."""
    from dataclasses import asdict

    opened = _expect_folder(_open(store, "")[0], "gc")
    result = opened.collect_garbage(keep=keep, grace_s=grace_hours * 3600, dry_run=dry_run, is_moved=moved)
    print_result(asdict(result), as_json, result.describe(dry_run=dry_run))


@app.command()
def verify(store: Folder = None, as_json: Json = False) -> None:
    """Read every byte of the store, and name what is damaged.

    Leave with status 1 if anything is.
    """
    from dataclasses import asdict

    from headway.core.sample_progress import SampleProgress
    from headway.core.text_format import pluralise

    opened = _expect_folder(_open(store, "")[0], "verify")
    with SampleProgress("Verifying", "files", LOG) as progress:
        damages = opened.verify(progress)
    found = f"{pluralise(len(damages), 'damaged place')}: restore them from a copy of the store."
    lines = [*map(str, damages), found if damages else "Every shard and version is intact."]
    print_result([asdict(one) for one in damages], as_json, "\n".join(lines))
    if damages:
        raise typer.Exit(1)


def _open(named: str | None, address: str) -> tuple[AnyStore, str]:
    """Opens the store that an option or an address names. Returns it, and the address without folder or URL."""
    from dataclasses import replace

    from headway.data.store_address import PREFIX, StoreAddress
    from headway.lifecycle.service.served_store import open_store, split_service

    if not address:
        return open_store(named), ""
    url, rest = split_service(address)
    place = StoreAddress.parse(rest)
    own = url or place.folder
    if own and named is not None:
        fix = "Leave --store out."
        raise UsageError("the address and --store both name a store", where=address, fix=fix)
    return open_store(own or named), str(replace(place, folder="")).removeprefix(PREFIX)


def _expect_folder(opened: AnyStore, verb: str) -> Store:
    """Returns a store in a folder. Raises UsageError for a data service, which has no request for a verb."""
    from headway.lifecycle.store.store import Store

    if not isinstance(opened, Store):
        fix = f"Run headway dataset {verb} on the machine of the service, with --store FOLDER; the service may run on."
        raise UsageError(f"a data service has no request for {verb}", fix=fix)
    return opened


def _find_expected(store: AnyStore, name: str, expected: str | None) -> str | None:
    return None if expected is None else store.resolve(f"{name}@{expected}").version


def _parse_label(text: str) -> Change:
    from headway.lifecycle.store.steps import label_sample

    sample, sign, name = text.rpartition("=")
    if not sign or not sample:
        raise UsageError(f"{text!r} is no label", fix="Write SAMPLE=LABEL, such as cat/0001.jpg=dog.")
    return label_sample(sample, name or None)


def _parse_splits(text: str | None) -> dict[str, float] | None:
    if text is None:
        return None
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, sign, share = part.strip().partition("=")
        try:
            number = float(share)
        except ValueError:
            sign = ""
        if not sign or name in shares:
            what = f"{text!r} are no splits"
            raise UsageError(what, where="--splits", fix="Write each split once, as in train=0.9,eval=0.1.")
        shares[name] = number
    return shares


def _name_new_classes(opened: AnyStore, name: str, before: str, after: str) -> None:
    """Names the classes that a change has brought: a slip in a label makes one."""
    from headway.core.errors import HeadwayError, suggest_nearest

    try:
        known, now = (set(opened.summarise(f"{name}@{version}").classes) for version in (before, after))
    # The change is made. A token may lack the scope to read it.
    except HeadwayError:
        return
    # The first labels of a data set are all new.
    new = sorted(now - known) if known else []
    for one in new[:_MAX_LISTED]:
        advice = suggest_nearest(one, known, only_close=True)
        LOG.warning(f"{one!r:.80} is a new class of {name}. {advice}".strip())
    if len(new) > _MAX_LISTED:
        LOG.warning(f"{len(new) - _MAX_LISTED:,} more classes are new.")


def _print_outcome(opened: AnyStore, name: str, outcome: Changed, as_json: bool) -> None:
    from headway.lifecycle.store.records import KINDS

    # As JSON, which is the same whether a store or a service has made the version.
    tree = outcome.to_json()
    for note in tree.get("notes", ()):
        LOG.info(note)
    if tree["is_new"] and tree["parent"] and (tree["added"] or tree["relabelled"]):
        _name_new_classes(opened, name, tree["parent"], tree["version"])
    rejected, copies = tree["rejected"], tree["near_copies"]
    for one in rejected[:_MAX_LISTED]:
        LOG.warning(f"Left out {one['name']}: {one['reason']}.")
    if (count := tree.get("rejected_count", len(rejected))) > _MAX_LISTED:
        LOG.warning(f"Left out {count - _MAX_LISTED:,} more; --json lists all.")
    version = f"store:{name}@v{tree['number']} ({tree['version'][:12]})"
    changes = ", ".join(f"{tree[kind]:,} {kind}" for kind in KINDS if tree[kind])
    text = f"{version}: {changes or 'no change'}."
    if not tree["is_new"]:
        text = f"Nothing changed: {version} is still the newest version."
    if tree["duplicates"]:
        text += f" Left out {tree['duplicates']:,} that are there already."
    if count := tree.get("near_copies_count", len(copies)):
        text += f" Near copies of other images: {count:,}."
    apart = [one for one in copies if one["is_apart"]]
    for copy in apart[:_MAX_LISTED]:
        LOG.warning(f"{copy['name']} is a near copy of {copy['first']}, which is in another split.")
    if len(apart) > _MAX_LISTED:
        LOG.warning(f"Other splits also have near copies of {len(apart) - _MAX_LISTED:,} more; --json lists all.")
    print_result(tree, as_json, text)
