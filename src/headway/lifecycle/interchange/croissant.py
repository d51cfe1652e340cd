"""Croissant 1.1: the description of a packed data set as JSON-LD, built from plain facts.

Source: the Croissant Format Specification 1.1, http://mlcommons.org/croissant/1.1. Shards are files with their SHA-256.
Names, labels and splits of the samples are in `samples.csv`, since readers of Croissant extract columns of CSV and
not of safetensors. In packs of the format tar, the images can be read too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, final

from headway.core.errors import UsageError
from headway.data.columns import LabelKind

CONFORMS_TO = "http://mlcommons.org/croissant/1.1"
SAMPLES = "samples"
LABELLED_BY = "labelled_by"
"""Column of `samples.csv` and field: who set the label."""
_VERSION = re.compile(r"\d+\.\d+\.\d+")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|nan|inf", re.IGNORECASE)
_SPLIT_URLS = {
    "train": "cr:TrainingSplit",
    **dict.fromkeys(("eval", "val", "valid", "validation"), "cr:ValidationSplit"),
    "test": "cr:TestSplit",
}
# Terms of appendix 1 of the specification, those that the validator of MLCommons expects beside them, and PROV-O.
_OWN_TERMS = (
    *("annotation", "arrayShape", "citeAs", "column", "containedIn", "equivalentProperty", "excludes", "extract"),
    *("field", "fileObject", "fileProperty", "fileSet", "format", "includes", "isArray", "isLiveDataset", "jsonPath"),
    *("key", "md5", "parentField", "path", "readLines", "recordSet", "references", "regex", "repeated", "replace"),
    *("samplingRate", "sdVersion", "separator", "source", "subField", "transform", "unArchive", "value"),
)
CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "sc": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "dct": "http://purl.org/dc/terms/",
    "prov": "http://www.w3.org/ns/prov#",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    **{term: f"cr:{term}" for term in _OWN_TERMS},
}


@final
@dataclass(frozen=True, kw_only=True)
class CroissantFacts:
    """Facts that only the owner of a data set knows.

    Attributes:
        name: name of the data set.
        description: what it holds.
        license: address of the licence, such as https://creativecommons.org/licenses/by/4.0/.
        creator: name of the person or organisation that made it.
        url: address of its page.
        published: date of publication, YYYY-MM-DD.
        version: MAJOR.MINOR.PATCH. Raise PATCH if the same data are packed otherwise, MINOR if data were only added,
            MAJOR if data were changed, removed or moved between splits.
    """

    name: str
    description: str
    license: str
    creator: str
    url: str
    published: str
    version: str

    def check(self) -> None:
        """Raises UsageError if a fact is missing or has the wrong form."""
        required = ("name", "description", "license", "creator", "url")
        if missing := [f"--{name}" for name in required if not getattr(self, name).strip()]:
            what = f"Croissant requires facts that no pack holds: {', '.join(missing)} "
            what += "is missing" if len(missing) == 1 else "are missing"
            raise UsageError(what, fix="They are kept in croissant.json, so you give them once.")
        if "://" not in self.url:
            raise UsageError(f"{self.url!r} is not an address", where="--url", fix="Write https://... of its page.")
        if not _VERSION.fullmatch(self.version):
            raise UsageError(f"{self.version!r} is not a version", where="--version", fix="Write MAJOR.MINOR.PATCH.")
        try:
            date.fromisoformat(self.published)
        except ValueError:
            fix = "Write YYYY-MM-DD."
            raise UsageError(f"{self.published!r} is not a date", where="--published", fix=fix) from None


@final
@dataclass(frozen=True, kw_only=True)
class DescribedFile:
    """A file of the data set.

    Attributes:
        id: unique within the description.
        path: relative to the description, with `/`.
        size: in bytes.
        sha256: of its content.
        media_type: its format.
        about: what it is.
    """

    id: str
    path: str
    size: int
    sha256: str
    media_type: str
    about: str


@final
@dataclass(frozen=True, kw_only=True)
class DescribedSet:
    """Facts about the samples, for a description.

    Attributes:
        label_kind: `class`, `multi` or `value`.
        classes: names of the classes, or of the numbers of a label.
        splits: names of the splits; empty if there is only one set.
        archives: ids of the files that are tar archives of images; empty for other packs.
        image_types: media types of the images in them.
        activity: what made the pack or the version.
        derived_from: what it was made from, as an address; empty: not known.
        labellers: who set the labels, by name; empty: not known.
        separator: between the labels of an image; only if it has several.
    """

    label_kind: LabelKind
    classes: tuple[str, ...]
    splits: tuple[str, ...]
    archives: tuple[str, ...]
    image_types: tuple[str, ...]
    activity: str
    derived_from: str = ""
    labellers: tuple[str, ...] = ()
    separator: str = ""


def list_label_columns(described: DescribedSet) -> list[str]:
    """Returns the columns of `samples.csv` that hold labels: `label`, `labels`, `value`, or one for each number."""
    if described.label_kind == "class":
        return ["label"]
    if described.label_kind == "multi":
        return ["labels"]
    return [f"value_{name}" for name in described.classes] or ["value"]


def build_croissant(facts: CroissantFacts, described: DescribedSet, files: Sequence[DescribedFile]) -> dict[str, Any]:
    """Builds the JSON-LD of a data set.

    Args:
        files: all files; the first one is `samples.csv`.
    """
    distribution = [_describe_file(file) for file in files]
    record_sets = [*_list_enumerations(described), _describe_samples(files[0].id, described)]
    if described.archives:
        distribution.append(_describe_archives(described))
        record_sets.append(_describe_images())
    return {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "name": facts.name,
        "description": facts.description,
        "conformsTo": CONFORMS_TO,
        "license": facts.license,
        "url": facts.url,
        "creator": {"@type": "sc:Organization", "name": facts.creator},
        "datePublished": facts.published,
        "version": facts.version,
        "prov:wasGeneratedBy": {"@type": "prov:Activity", "prov:label": described.activity},
        **({"prov:wasDerivedFrom": {"@id": described.derived_from}} if described.derived_from else {}),
        "distribution": distribution,
        "recordSet": record_sets,
    }


def _describe_file(file: DescribedFile) -> dict[str, Any]:
    return {
        "@type": "cr:FileObject",
        "@id": file.id,
        "name": file.path,
        "description": file.about,
        "contentUrl": file.path,
        "contentSize": f"{file.size} B",
        "encodingFormat": file.media_type,
        "sha256": file.sha256,
    }


def _describe_archives(described: DescribedSet) -> dict[str, Any]:
    return {
        "@type": "cr:FileSet",
        "@id": "image-files",
        "name": "image-files",
        "description": "The images in the shards.",
        "containedIn": [{"@id": name} for name in described.archives],
        "encodingFormat": list(described.image_types),
        "includes": [f"*.{kind.removeprefix('image/').replace('jpeg', 'jpg')}" for kind in described.image_types],
    }


def _describe_images() -> dict[str, Any]:
    def extract(name: str, kind: str, what: str, about: str) -> dict[str, Any]:
        source = {"fileSet": {"@id": "image-files"}, "extract": {"fileProperty": what}}
        return _build_field("images", name, kind, about, source=source)

    return {
        "@type": "cr:RecordSet",
        "@id": "images",
        "name": "images",
        "description": "The images of the shards.",
        "field": [
            extract("content", "sc:ImageObject", "content", "The image."),
            extract("file", "sc:Text", "filename", "Name of the file in its shard."),
        ],
    }


def _list_enumerations(described: DescribedSet) -> list[dict[str, Any]]:
    """Returns the record sets of the classes and of the splits, which hold their data themselves."""
    found = []
    if described.classes and described.label_kind != "value":
        rows = [{"classes/name": name} for name in described.classes]
        fields = [_build_field("classes", "name", "sc:Text", "Name of the class.")]
        found.append(_build_enumeration("classes", "sc:Enumeration", "The classes.", fields, rows))
    if described.splits:
        has_urls = all(name in _SPLIT_URLS for name in described.splits)
        fields = [_build_field("splits", "name", "sc:Text", "Name of the split.")]
        if has_urls:
            fields.append(_build_field("splits", "url", "sc:URL", "Meaning of the split."))
        urls = [{"splits/url": _SPLIT_URLS[name]} if has_urls else {} for name in described.splits]
        rows = [{"splits/name": name} | url for name, url in zip(described.splits, urls, strict=True)]
        found.append(_build_enumeration("splits", "cr:Split", "The splits.", fields, rows))
    return found


def _build_enumeration(
    name: str, kind: str, about: str, fields: list[dict[str, Any]], rows: list[dict[str, str]]
) -> dict[str, Any]:
    head = {"@type": "cr:RecordSet", "@id": name, "name": name, "description": about, "dataType": kind}
    return {**head, "key": {"@id": f"{name}/name"}, "field": fields, "data": rows}


def _describe_samples(file: str, described: DescribedSet) -> dict[str, Any]:
    def extract(name: str, kind: str | list[str], about: str, **more: Any) -> dict[str, Any]:
        source: dict[str, Any] = {"fileObject": {"@id": file}, "extract": {"column": name}}
        if (separator := more.pop("separator", None)) is not None:
            source["transform"] = {"separator": separator}
        return _build_field(SAMPLES, name, kind, about, source=source, **more)

    fields = [
        extract("sha256", "sc:Text", "SHA-256 of the stored bytes of the image."),
        extract("name", "sc:Text", "Name of the image in its source."),
    ]
    classes = _refer_to("classes", described.classes)
    if described.labellers:
        agents = [{"@type": "prov:Agent", "prov:label": name} for name in described.labellers]
        classes["prov:wasAttributedTo"] = agents
    for column in list_label_columns(described):
        if column == "label":
            fields.append(extract(column, ["sc:Text", "cr:Label"], "Class of the image.", **classes))
        elif column == "labels":
            more = {"separator": described.separator, "isArray": True, "arrayShape": "-1"}
            fields.append(extract(column, ["sc:Text", "cr:Label"], "Labels of the image.", **more))
        else:
            fields.append(extract(column, ["sc:Float", "cr:Label"], "A number to predict."))
    if described.splits:
        fields.append(extract("split", "sc:Text", "The split.", **_refer_to("splits", described.splits)))
    if described.labellers:
        fields.append(extract(LABELLED_BY, "sc:Text", "Who set the label."))
    fields.append(extract("width", "sc:Integer", "Width in pixels."))
    fields.append(extract("height", "sc:Integer", "Height in pixels."))
    if described.archives:
        fields.append(extract("file", "sc:Text", "Name of its file in the shard."))
    about = "One row for each image: its labels and where it is."
    head = {"@type": "cr:RecordSet", "@id": SAMPLES, "name": SAMPLES, "description": about}
    return {**head, "field": fields}


def _refer_to(record_set: str, names: Sequence[str]) -> dict[str, Any]:
    """Returns the reference of a field to the enumeration of its values."""
    # Readers of CSV take a column of 0, 1, 2 for numbers, and would not find them among names.
    if not names or all(_NUMBER.fullmatch(name) for name in names):
        return {}
    return {"references": {"field": {"@id": f"{record_set}/name"}}}


def _build_field(record_set: str, name: str, kind: str | list[str], about: str, **more: Any) -> dict[str, Any]:
    head = {"@type": "cr:Field", "@id": f"{record_set}/{name}", "name": name, "description": about, "dataType": kind}
    return {**head, **more}
