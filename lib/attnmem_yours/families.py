"""Models of known families, from their ``config.json``: each family is a row of families.toml."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any, NamedTuple, NoReturn

from attnmem.checks import refuse
from attnmem.theory.blocks import Block, Model
from attnmem.theory.capacity import LayerSizes

_TABLE = tomllib.loads(resources.files(__package__).joinpath("families.toml").read_text("utf-8"))
_BLOCK = ("mlp_bias", "gated", "norms", "affine", "shift", "place", "parallel", "layer_scale")
_BY_HAND = "a layer by hand: capacity --heads ... --dim ..."


def read(given: Mapping[str, Any], part: str = "") -> Model:
    """The model that a ``config.json`` describes, from its contents.

    ``part`` names one of several models inside it, such as ``text_config``. Whatever is not counted
    is refused by a ``ValueError`` that says what to do.
    """
    kind, row, config = file = _file(given, part)
    size = file.size
    d, heads, layers = size("width", least=3), size("heads"), size("layers", most=10_000)
    head, groups = size("head", d // heads), size("groups", heads)
    units = size("inner", int(d * size("ratio", None, 1, 1000, float)) or None)
    turned = size("turned", int(head * size("share", None, 0, 1, float)))
    if heads % groups or turned % 2 or turned > head or (d % heads and head == d // heads):
        here = f"d = {d}, {groups} groups, heads of {head} with {turned} turned coordinates"
        file.refuse(row["heads"], f"sizes that divide each other, and turned pairs ({here})")
    fixed = {"num_key_value_heads": groups, "head_dim": head, "num_hidden_layers": layers}
    file.check(fixed, {"width": d, "head": d // heads})
    if (act := config.get(row["act"], row["act"])) not in _TABLE["acts"]:
        file.refuse(row["act"], f"one of {', '.join(_TABLE['acts'])}")
    step, m, each = size("every"), d - (row["norm"] == "layer"), heads // groups
    if (marks := config.get(row["unturned"])) is None:  # every so many blocks turn nothing, if any
        marks = [row["mark"] if step and i % step == 0 else "" for i in range(1, layers + 1)]
    if not isinstance(marks, list) or len(marks) != layers:
        file.refuse(row["unturned"], f"a list of {layers}")
    layer = LayerSizes(
        dim=d,
        token_dim=m,
        groups=groups,
        heads_per_group=each,
        head_dim=head,
        value_dim=head,
        turned=turned,
        bias=row["bias"],
        normed=row["qk"],
    )
    turns = {x: dataclasses.replace(layer, turned=x) for x in (0, turned)}
    kinds = {x: row[x] for x in _BLOCK} | {"homogeneous": "relu" in act}
    kinds |= {"units": (units * 2 // 3 + 7) // 8 * 8 if row["thirds"] else units}
    blocks = [Block(attention=turns[turned * (x != row["mark"])], **kinds) for x in marks]
    blocks[0] = dataclasses.replace(blocks[0], norms=row["norms"] - (not row["first_norm"]))
    patch, buckets, name = size("patch"), size("buckets"), config.get("_name_or_path")
    n = (size("image", least=patch) // patch) ** 2 if patch else size("places", least=3)
    n += row["more"] + size("registers", least=0)
    seen = max(0, buckets - 1)  # a later token at distance 0 does not occur
    sizes = {"rows": n + row["extra"], "positions": n, "types": size("types", least=0)}
    sizes |= {"words": size("vocab"), "patch": patch**2 * size("channels")}
    sizes |= {x: row[x] for x in ("first", "patch_bias", "read_bias")}
    ends = str(config.get("architectures"))  # of classes or answers: its words are not read
    lm = row["lm"] and not re.search("Classification|QuestionAnswering", ends)
    tied = bool(config["tie_word_embeddings"]) if lm else None
    name = name if isinstance(name, str) and name and name[:80].isprintable() else kind
    name = name[:80]
    if row["part"]:
        name += f", its {row['part']}"
    if config.get("quantization_config"):
        name += ", quantized in its file, counted as if it were not"
    return Model(name=name, blocks=tuple(blocks), tied=tied, offsets=(buckets, seen), **sizes)


class _File(NamedTuple):
    kind: str
    row: dict[str, Any]  # after its rules
    config: dict[str, Any]

    def refuse(self, field: str, expected: str) -> NoReturn:
        got = f"{self.config[field]!r:.60}" if field in self.config else "nothing"
        refuse(field, got, f"{expected}, for {self.kind}; or {_BY_HAND}")

    def size(self, name: str, usual=None, least=1, most=10**7, of=int) -> Any:
        field = self.row[name]
        found = self.config.get(field) if isinstance(field, str) else field
        if name in ("image", "patch") and isinstance(found, list) and len({*map(str, found)}) == 1:
            found = found[0]  # of a square
        if field == "" or (found is None and usual is not None):
            return usual or 0
        if type(found) not in (int, of) or not (found == field or least <= found <= most):
            kind = "an integer" if of is int else "a number"
            self.refuse(field, f"{kind} from {least} to {most}")
        return found

    def check(self, fixed: dict[str, int], own: dict[str, int]) -> None:
        # Refuse what would change a layer and is not counted.
        known = {x for x in self.row.values() if isinstance(x, str)} | {*self.row["absent"]}
        usual = _TABLE["watched"] | {x: [size] for x, size in fixed.items()}
        usual = {x: values for x, values in usual.items() if x not in known}
        flags = [x for x, value, _ in self.row["if"] if type(value) is bool]
        usual |= {x: [False, True] for x in (*flags, "tie_word_embeddings")} | self.row["only"]
        for field, values in usual.items():
            values = [own.get(x, x) if isinstance(x, str) else x for x in values]
            if self.config.get(field) is not None and self.config[field] not in values:
                self.refuse(field, " or ".join(map(str, values)) or "nothing")


def _file(given: Mapping[str, Any], part: str) -> _File:
    # The file, or one inside it, by the rules of its family.
    kind = given.get("model_type")
    usual = _TABLE["inside"].get(str(kind), {})
    parts = {x: y for x, y in given.items() if isinstance(y, Mapping)}
    kinds = {x: k for x, y in parts.items() if (k := y.get("model_type") or usual.get(x))}
    counted = [f"{x!r:.60}" for x, k in kinds.items() if k in [*_TABLE["family"]]][:9]
    if part and part not in kinds:
        refuse("part", f"{part!r:.60}", f"{' or '.join(counted) or 'no part'}, of this file")
    if part:
        tied = {x: y for x, y in given.items() if x == "tie_word_embeddings"}
        kind, given = kinds[part], _TABLE["nested"].get(str(kinds[part]), {}) | parts[part] | tied
    families = [*_TABLE["family"]]
    why = "".join(f", {why}" for why, types in _TABLE["refused"].items() if kind in types)
    if why or kind not in families:
        fields, signs = json.dumps(given, default=str), _TABLE["signs"].items()
        why = why or "".join(f", {what}" for what, sign in signs if re.search(sign, fields))
        near = ", ".join(difflib.get_close_matches(str(kind), families, 5, 0))
        known = "another model" if why else f"one of {len(families)} families, such as {near}"
        known = f"its --part {' or '.join(counted)}" if counted and not part else known
        got = "nothing" if kind is None else f"{kind!r:.60}{why}"
        refuse("model_type", got, f"{_BY_HAND}; or {known}")
    row, config = _row(kind), {x: y for x, y in given.items() if x}
    for x in [x for x, y in given.items() if isinstance(y, Mapping)]:
        config |= {f"{x}.{y}": found for y, found in given[x].items()}
    for x, y, *only in _TABLE["also"]:
        config |= {x: config[y]} if config.get(y) is not None and kind in (only or [kind]) else {}
    config = row["absent"] | config
    for field, value, changes in row["if"]:
        found = bool(config.get(field)) if type(value) is bool else config.get(field)
        row |= changes if field in config and found == value else {}
    return _File(kind, row, config)


def _row(kind: str) -> dict[str, Any]:
    own = _TABLE["family"][kind]
    base = _row(own["like"]) if "like" in own else _TABLE["default"]
    joined = {x: base[x] | own.get(x, {}) for x in ("absent", "only")}
    return base | own | joined | {"if": base["if"] + own.get("if", [])}
