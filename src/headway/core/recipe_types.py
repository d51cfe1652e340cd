"""Walks the types of a recipe's keys: the parts that may stand at a key, and all keys of a tree."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

_DEEPEST = 8
"""Levels of parts that the walk over all keys goes down: a part may hold its own kind."""


def walk_keys(annotation: Any, prefix: str = "", depth: int = 0) -> Iterator[str]:
    """Yields all keys of a model by their dotted names; a list of parts shows its first entry."""
    for part in list_parts(annotation) if depth < _DEEPEST else ():
        for name, field in part.model_fields.items():
            yield prefix + name
            is_list = any(typing.get_origin(one) in (list, tuple) for one in list_alternatives(_get_type(field)))
            yield from walk_keys(_get_type(field), f"{prefix}{name}.{'0.' if is_list else ''}", depth + 1)


def list_alternatives(annotation: Any) -> list[Any]:
    """Returns the members of a union, at any depth; a type that is not a union is its own only member."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return list_alternatives(inner[0])
    # `A | B` and `Optional[A]` have different origins.
    if origin in (typing.Union, types.UnionType):
        return [found for one in inner for found in list_alternatives(one)]
    return [annotation]


def list_parts(annotation: Any) -> list[type[BaseModel]]:
    """Returns all parts that may stand at a place, or in a list or mapping there."""
    found = []
    for one in list_alternatives(annotation):
        # Parts inside lists, tuples and mappings.
        if typing.get_origin(one) is not None:
            found += [model for inner in typing.get_args(one) for model in list_parts(inner)]
        elif isinstance(one, type) and issubclass(one, BaseModel):
            found.append(one)
    return found


def find_first_part(annotation: Any) -> type[BaseModel] | None:
    """Returns the first part that may stand at a place; None if none may."""
    return next(
        (one for one in list_alternatives(annotation) if isinstance(one, type) and issubclass(one, BaseModel)), None
    )


def find_tagged_members(annotation: Any) -> dict[str, type[BaseModel]]:
    """Returns the members of a tagged union by tag; empty for every other type."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        # Only `Field(discriminator="name")` makes a union tagged by a key.
        names = [one.discriminator for one in inner[1:] if isinstance(one, FieldInfo)]
        if name := next((name for name in names if isinstance(name, str)), None):
            members = list_parts(inner[0])
            # A tag is a Literal, whose arguments are the values that stand in a recipe.
            return {tag: one for one in members for tag in typing.get_args(one.model_fields[name].annotation)}
        return find_tagged_members(inner[0])
    if origin in (typing.Union, types.UnionType):
        return {tag: member for one in inner for tag, member in find_tagged_members(one).items()}
    return {}


def find_tag_key(members: Mapping[str, type[BaseModel]]) -> str:
    """Returns the key that tells the members of a tagged union apart, such as `name`."""
    tag, member = next(iter(members.items()))
    return next(name for name, field in member.model_fields.items() if tag in typing.get_args(field.annotation))


def get_value_type(annotation: Any, key: str | int) -> Any:
    """Returns the type of the value that a key has in a value of this type; None: unknown."""
    for one in list_alternatives(annotation):
        origin, inner = typing.get_origin(one), typing.get_args(one)
        # The first type stands for all: the tuples of a recipe hold one type each.
        if origin in (list, tuple) and isinstance(key, int):
            return inner[0]
        if origin in (dict, Mapping) and isinstance(key, str):
            return inner[1]
        if isinstance(one, type) and issubclass(one, BaseModel) and key in one.model_fields:
            return _get_type(one.model_fields[str(key)])
    return None


def count_entries(annotation: Any) -> int | None:
    """Returns the number of entries of a list with a fixed number of them; None for every other type."""
    for one in list_alternatives(annotation):
        inner = typing.get_args(one)
        if typing.get_origin(one) is tuple and Ellipsis not in inner:
            return len(inner)
    return None


def has_list_of_texts(annotation: Any) -> bool:
    """Returns True if a list of texts may stand at a place."""
    lists = [one for one in list_alternatives(annotation) if typing.get_origin(one) in (list, tuple)]
    kinds = [kind for one in lists for kind in list_alternatives(typing.get_args(one)[0])]
    return any(kind is str or typing.get_origin(kind) is typing.Literal for kind in kinds)


def _get_type(field: FieldInfo) -> Any:
    """Returns a field's type with its discriminator, which pydantic takes out of the annotation."""
    if isinstance(field.discriminator, str):
        return Annotated[field.annotation, Field(discriminator=field.discriminator)]
    return field.annotation
