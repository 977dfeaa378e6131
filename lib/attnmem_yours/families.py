"""Models of known families, from their ``config.json``: each family is a row of families.toml."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import json
import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any, NamedTuple, NoReturn

from attnmem.checks import reading, refuse
from attnmem.theory.blocks import Block, Model
from attnmem.theory.capacity import LayerSizes

with reading("families.toml", "TOML"):
    TABLE = tomllib.loads(resources.files(__package__).joinpath("families.toml").read_text("utf-8"))
# Fields of a row that are sizes of the model: names of fields of the config, or numbers.
_SIZES = {"width", "layers", "heads", "groups", "head", "inner", "ratio", "vocab", "types"}
_SIZES |= {"image", "patch", "channels", "registers", "places", "turned", "share", "buckets"}
_SIZES |= {"every"}
_CHOICES = {
    "norm": ["rms", "layer"],
    "place": ["pre", "post", "out", "both"],
    "qk": ["", "head", "all"],
}
_BLOCK = ("mlp_bias", "gated", "norms", "affine", "shift", "place", "parallel", "layer_scale")
_BY_HAND = "a layer by hand: capacity --heads ... --dim ..."


class _File(NamedTuple):
    family: str
    row: dict[str, Any]  # of families.toml, after its rules
    config: dict[str, Any]


class _Sizes(NamedTuple):
    dim: int
    heads: int
    layers: int
    head_dim: int
    groups: int  # of heads that share keys and values
    units: int
    turned: int  # coordinates of a head that positions turn


def read(config: Mapping[str, Any], part: str = "") -> Model:
    """The model that a ``config.json`` describes, from its contents.

    ``part`` names one of several models inside it, such as ``text_config``. Whatever is not counted
    is refused by a ``ValueError`` that says what to do.
    """
    file = _file(config, part)
    row = file.row
    sizes = _sizes(file)
    _check_uncounted(file, sizes)
    blocks = _blocks(file, sizes)
    patch, buckets = _size(file, "patch"), _size(file, "buckets")
    if patch:
        places = (_size(file, "image", least=patch) // patch) ** 2
    else:
        places = _size(file, "places", least=3)
    positions = places + row["more"] + _size(file, "registers", least=0)
    return Model(
        name=_name(file),
        blocks=blocks,
        types=_size(file, "types", least=0),
        words=_size(file, "vocab"),
        patch=patch**2 * _size(file, "channels"),
        patch_bias=row["patch_bias"],
        rows=positions + row["extra"],
        positions=positions,
        first=row["first"],
        offsets=(buckets, max(0, buckets - 1)),  # a later token at distance 0 does not occur
        tied=_tied(file),
        read_bias=row["read_bias"],
    )


def _sizes(file: _File) -> _Sizes:
    dim, heads = _size(file, "width", least=3), _size(file, "heads")
    layers = _size(file, "layers", most=10_000)
    head_dim, groups = _size(file, "head", dim // heads), _size(file, "groups", heads)
    # Zero units, or no ratio at all, are nothing to fall back on.
    usual_units = int(dim * _size(file, "ratio", most=1000, real=True)) or None
    units = _size(file, "inner", usual_units)
    share = _size(file, "share", least=0, most=1, real=True)
    turned = _size(file, "turned", int(head_dim * share))
    cut_evenly = dim % heads == 0 or head_dim != dim // heads
    if heads % groups or turned % 2 or turned > head_dim or not cut_evenly:
        sizes = f"d = {dim}, {groups} groups, heads of {head_dim} with {turned} turned coordinates"
        expected = f"sizes that divide each other, and turned pairs ({sizes})"
        _refuse(file, file.row["heads"], expected)
    return _Sizes(dim, heads, layers, head_dim, groups, units, turned)


def _blocks(file: _File, sizes: _Sizes) -> tuple[Block, ...]:
    row = file.row
    activation = file.config.get(row["act"], row["act"])
    if activation not in TABLE["acts"]:
        _refuse(file, row["act"], f"one of {', '.join(TABLE['acts'])}")
    attention = LayerSizes(
        dim=sizes.dim,
        token_dim=sizes.dim - 1 if row["norm"] == "layer" else sizes.dim,
        groups=sizes.groups,
        heads_per_group=sizes.heads // sizes.groups,
        head_dim=sizes.head_dim,
        value_dim=sizes.head_dim,
        turned=sizes.turned,
        bias=row["bias"],
        normed=row["qk"],
    )
    units = sizes.units
    if row["thirds"]:  # two thirds, up to a multiple of 8
        units = (units * 2 // 3 + 7) // 8 * 8
    block = Block(
        attention=attention,
        units=units,
        homogeneous="relu" in activation,
        **{field: row[field] for field in _BLOCK},
    )
    unturned = dataclasses.replace(block, attention=dataclasses.replace(attention, turned=0))
    marks = _marks(file, sizes.layers)
    blocks = [unturned if mark == row["mark"] else block for mark in marks]
    if not row["first_norm"]:
        blocks[0] = dataclasses.replace(blocks[0], norms=row["norms"] - 1)
    return tuple(blocks)


def _marks(file: _File, layers: int) -> list:
    """What the file says of each block: ``mark`` is one whose positions turn nothing."""
    row, step = file.row, _size(file, "every")
    marks = file.config.get(row["unturned"])
    if marks is None:
        marks = [""] * layers
        if step:
            marks[step - 1 :: step] = [row["mark"]] * (layers // step)
    if not isinstance(marks, list) or len(marks) != layers:
        _refuse(file, row["unturned"], f"a list of {layers}")
    return marks


def _tied(file: _File) -> bool | None:
    """Whether the read-out is that of the words; None for a model without one."""
    # Those of classes or answers read no words.
    ends = re.search("Classification|QuestionAnswering", str(file.config.get("architectures")))
    if ends or not file.row["lm"]:
        return None
    return bool(file.config["tie_word_embeddings"])


def _name(file: _File) -> str:
    name = file.config.get("_name_or_path")
    if not isinstance(name, str) or not name or not name[:80].isprintable():
        name = file.family
    name = name[:80]
    if file.row["part"]:
        name += f", its {file.row['part']}"
    if file.config.get("quantization_config"):
        name += ", quantized in its file, counted as if it were not"
    return name


def _refuse(file: _File, field: str, expected: str) -> NoReturn:
    got = f"{file.config[field]!r:.60}" if field in file.config else "nothing"
    refuse(field, got, f"{expected}, for {file.family}; or {_BY_HAND}")


def _size(
    file: _File,
    name: str,
    usual: int | None = None,
    *,
    least: int = 1,
    most: int = 10**7,
    real: bool = False,
) -> Any:
    """A size of the model, by the name that families.toml has for it; 0 if the row has none."""
    field = file.row[name]
    if field == "":
        return usual or 0
    if not isinstance(field, str):
        return field
    value = file.config.get(field)
    if name in ("image", "patch") and isinstance(value, list) and len({*map(str, value)}) == 1:
        value = value[0]  # of a square
    if value is None and usual is not None:
        return usual
    fits = type(value) is int or (real and type(value) is float)
    if not fits or not least <= value <= most:
        a_number = "a number" if real else "an integer"
        _refuse(file, field, f"{a_number} from {least} to {most}")
    return value


def _check_uncounted(file: _File, sizes: _Sizes) -> None:
    """Refuse what would change a layer and is not counted."""
    row = file.row
    fixed = {
        "num_key_value_heads": sizes.groups,
        "head_dim": sizes.head_dim,
        "num_hidden_layers": sizes.layers,
    }
    harmless = TABLE["watched"] | {field: [size] for field, size in fixed.items()}
    for field in (*row.values(), *row["absent"]):  # they are read
        if isinstance(field, str):
            harmless.pop(field, None)
    for field, value, _ in row["if"]:
        if type(value) is bool:
            harmless[field] = [False, True]
    harmless["tie_word_embeddings"] = [False, True]
    by_name = {"width": sizes.dim, "head": sizes.dim // sizes.heads}
    for field, values in (harmless | row["only"]).items():
        values = [
            by_name.get(value, value) if isinstance(value, str) else value for value in values
        ]
        value = file.config.get(field)
        if value is not None and value not in values:
            _refuse(file, field, " or ".join(map(str, values)) or "nothing")


# --- the row of a file ----------------------------------------------------------------------------


def _file(config: Mapping[str, Any], part: str) -> _File:
    """The file, or one inside it, by the rules of its family."""
    family, inner = config.get("model_type"), _inner_families(config)
    if part:
        if part not in inner:
            counted = _counted(inner) or ["no part"]
            refuse("part", f"{part!r:.60}", f"{' or '.join(counted)}, of this file")
        family = inner[part]
        nested = TABLE["nested"].get(str(family), {}) | config[part]
        if "tie_word_embeddings" in config:
            nested["tie_word_embeddings"] = config["tie_word_embeddings"]
        config = nested
    if not isinstance(family, str) or family not in TABLE["family"] or _why_refused(family):
        _refuse_family(family, config, [] if part else _counted(inner))
    row = row_of(family)
    settings = row["absent"] | _flat(family, config)
    for field, value, changes in row["if"]:
        if field not in settings:
            continue
        setting = settings[field]
        if type(value) is bool:
            setting = bool(setting)
        if setting == value:
            row = row | changes
    return _File(family, row, settings)


def _inner_families(config: Mapping[str, Any]) -> dict[str, str]:
    """The families of the models inside a file, by their names in it."""
    usual, inner = TABLE["inside"].get(str(config.get("model_type")), {}), {}
    for name, settings in config.items():
        if isinstance(settings, Mapping):
            family = settings.get("model_type") or usual.get(name)
            if family:
                inner[name] = family
    return inner


def _counted(inner: Mapping[str, str]) -> list[str]:
    names = [name for name, family in inner.items() if family in [*TABLE["family"]]]
    return [f"{name!r:.60}" for name in names[:9]]


def _flat(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by one name each, those of inner objects as ``object.name``."""
    settings = {field: value for field, value in config.items() if field}
    for field, value in config.items():
        if field and isinstance(value, Mapping):
            settings |= {f"{field}.{name}": inner for name, inner in value.items()}
    for name, other, *families in TABLE["also"]:
        if settings.get(other) is not None and (not families or family in families):
            settings[name] = settings[other]
    return settings


def _why_refused(family: Any) -> list[str]:
    return [reason for reason, families in TABLE["refused"].items() if family in families]


def _refuse_family(family: Any, config: Mapping[str, Any], parts: list[str]) -> NoReturn:
    reasons = _why_refused(family)
    if not reasons:
        fields = json.dumps(config, default=str)
        reasons = [reason for reason, sign in TABLE["signs"].items() if re.search(sign, fields)]
    got = "nothing" if family is None else ", ".join([f"{family!r:.60}", *reasons])
    families = [*TABLE["family"]]
    near = ", ".join(difflib.get_close_matches(str(family), families, 5, 0))
    if parts:
        expected = f"its --part {' or '.join(parts)}"
    elif reasons:
        expected = "another model"
    else:
        expected = f"one of {len(families)} families, such as {near}"
    refuse("model_type", got, f"{_BY_HAND}; or {expected}")


@functools.cache
def row_of(family: str) -> dict[str, Any]:
    """The row of a family, with what it has from [default] and from the rows that it is like."""
    own = TABLE["family"][family]
    check_row(family, own)
    base = row_of(own["like"]) if "like" in own else TABLE["default"]
    row = base | own
    for name in ("absent", "only"):
        row[name] = base[name] | own.get(name, {})
    row["if"] = base["if"] + own.get("if", [])
    return row


def check_row(family: str, row: Mapping[str, Any]) -> None:
    """Refuse a mistake in a row of families.toml, by its field and value."""
    above = list(itertools.takewhile(lambda name: name != family, TABLE["family"]))
    for field, value in row.items():
        where = f"families.toml, family.{family}.{field}"
        if field != "like":
            _check_field(where, field, value)
        elif value not in above:
            near = ", ".join(difflib.get_close_matches(str(value), above, 5, 0))
            refuse(where, repr(value), f"a family whose row stands above this one, such as {near}")


def _check_field(where: str, field: str, value: Any) -> None:
    if field not in TABLE["default"]:
        near = ", ".join(difflib.get_close_matches(field, TABLE["default"], 3, 0))
        refuse(where, f"{value!r:.60}", f"a field of [default], such as {near}")
    if not _fits(field, value):
        refuse(where, f"{value!r:.60}", _expected_of(field))
    if field == "only":
        for name, values in value.items():
            if not isinstance(values, list):
                refuse(f"{where}.{name}", f"{values!r:.60}", "a list of values that are counted")
    if field == "if":
        for rule in value:
            if not _is_rule(rule):
                expected = "[field of the config, value, { changes of this row }]"
                refuse(where, f"{rule!r:.60}", expected)
            for name, changed in rule[2].items():
                _check_field(f"{where}.{name}", name, changed)


def _fits(field: str, value: Any) -> bool:
    if field in _CHOICES:
        return value in _CHOICES[field]
    if field == "bias":
        return isinstance(value, str) and {*"qkvo"}.issuperset(value)
    if field in _SIZES:
        return type(value) in (str, int, float)
    return field == "mark" or type(value) is type(TABLE["default"][field])


def _expected_of(field: str) -> str:
    if field in _CHOICES:
        return " or ".join(map(repr, _CHOICES[field]))
    if field == "bias":
        return "letters of 'qkvo'"
    if field in _SIZES:
        return "the name of a field of the config, a number, or ''"
    names = {bool: "true or false", int: "an integer", str: "a text", dict: "a table"}
    return names.get(type(TABLE["default"][field]), "a list")


def _is_rule(rule: Any) -> bool:
    return isinstance(rule, list) and len(rule) == 3 and isinstance(rule[2], dict)
