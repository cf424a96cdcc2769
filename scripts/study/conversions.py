"""What the name of a run says: what is converted, how, and to which recipe.

Of bench_training.py ``WHAT[+OPTION]...[:RECIPE]``, of converge.py ``RECIPE[+OPTION]...``, where both is converted or,
with ``+experts`` or ``+linears``, these alone. What is not named is off, whatever a TOML says.
"""

from dataclasses import dataclass

from titan_mxfp8.format.mx import BLOCK_SIZE
from titan_mxfp8.recipe import BF16, GROUPED_MM, LINEAR, get_recipe

CONVERTED_BY = {"bf16": (), "grouped": (GROUPED_MM,), "linears": (LINEAR,), "both": (GROUPED_MM, LINEAR)}
ALONE = {"experts": "grouped", "linears": "linears"}
OPTIONS = ("async", "dispatch", "experts", "graph", "linears", "rebase", "repeat", "requantize")
FLOAT8 = "float8"  # TorchTitan's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """``what`` is a key of ``CONVERTED_BY``, options are of ``OPTIONS``; the recipe is empty for the TOML's, and
    ``bf16`` for the control, our dispatch with nothing quantised."""

    what: str
    options: tuple[str, ...]
    recipe: str

    @property
    def converters(self) -> tuple[str, ...]:
        return CONVERTED_BY[self.what]

    @property
    def full_recipe(self) -> str:
        """The recipe's name, as it is with ``rebase``."""
        if self.recipe in ("", FLOAT8, BF16.name):
            return self.recipe
        return get_recipe(self.recipe, rebase="rebase" in self.options).name

    def flags(self) -> list[str]:
        """TorchTitan 0.2.2's flags for recipe and options, whatever a TOML says of these; and for what it says of an
        option, which without it would be an error. Raises ValueError if it has no such thing, or we have not."""
        if "async" in self.options:
            raise ValueError("MinimalAsyncEP is TorchTitan 0.3's: async cannot be trained with 0.2.2")
        flags = [f"--{converter}.recipe_name={self.recipe}" for converter in self.converters if self.recipe]
        for option, field_name in (("rebase", "hopper_rebase"), ("requantize", "requantize_input")):
            switch = field_name if option in self.options else f"no-{field_name}"
            flags += [f"--{converter}.{switch}" for converter in self.converters]
        if self.recipe and "rebase" not in self.options and get_recipe(self.recipe).block_k == BLOCK_SIZE:
            flags += [f"--{converter}.hopper_rebase_report=0" for converter in self.converters]
        if GROUPED_MM in self.converters:
            dispatch = ("dispatch=auto",) if "dispatch" in self.options else ("dispatch=off", "dispatch_rows=counted")
            flags += [f"--{GROUPED_MM}.{field}" for field in dispatch]
        return [*flags, f"--training.cuda_graph={'on' if 'graph' in self.options else 'off'}"]


def conversion_of(name: str) -> Conversion:
    """Of a name such as ``both+rebase+dispatch:mxfp8_2d`` or ``mxfp8_2d+rebase+dispatch``. Raises ValueError if there
    is no such run, or no such recipe."""
    what, colon, recipe = name.partition(":")
    what, *options = what.split("+")
    has, alone = set(options), [ALONE[option] for option in options if option in ALONE]
    if what in CONVERTED_BY:
        wrong = bool(alone)
    else:
        wrong = bool(colon) or len(alone) > 1
        what, recipe = [*alone, "both"][0], what
    if what == "bf16" and "dispatch" in has and not recipe:
        what, recipe = "grouped", BF16.name
    is_control = recipe == BF16.name
    if (
        wrong
        or not has <= set(OPTIONS)
        or len(has) < len(options)
        or (is_control and not (what == "grouped" and "dispatch" in has))
        or ((is_control or what == "bf16") and has & {"rebase", "requantize"})
        or ("async" in has and what != "bf16")
        or (what == "linears" and "dispatch" in has)
        or (what == "bf16" and recipe)
        or (recipe == FLOAT8 and options)
    ):
        raise ValueError(
            f"unknown run {name!r}: RECIPE[+OPTION]..., or WHAT[+OPTION]...[:RECIPE] of {', '.join(CONVERTED_BY)}; "
            f"options, each once, are {', '.join(OPTIONS)}; bf16 has no recipe, with dispatch is the control, and "
            f"alone can be async; linears dispatch nothing; {FLOAT8}, TorchTitan's own, has no options"
        )
    if recipe not in ("", FLOAT8):
        recipe = get_recipe(recipe).name
        get_recipe(recipe, rebase="rebase" in options)
    return Conversion(what=what, options=tuple(options), recipe=recipe)
