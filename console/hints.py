"""What to type instead of a command that can't be run, and what `--help` prints."""

import difflib
import re
import shlex
from dataclasses import fields
from typing import Any, get_args, get_origin

from config import PROJECT, Config
from console.errors import one_line

KEYS = {group: [key.name for key in fields(values)] for group, values in vars(Config()).items()}
VALUES: dict[Any, str] = {  # by the type in the schema
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    tuple[float, float]: "a list of numbers, as in [0.9,0.95]",
}
EXPLAINED = "gpt2_train_cfg.yaml explains all keys and their values"


def explain(error: BaseException, typed: list[str], recipes: list[str]) -> str:
    """What is wrong with a command, in one line, and what to type instead where that can be known.

    Args:
        error: the complaint: Hydra's, OmegaConf's or our own.
        typed: the command's arguments.
        recipes: the names that `+recipe=` may have.
    """
    if not type(error).__module__.startswith(("hydra", "omegaconf")):
        return one_line(error)
    lines = [str(e).splitlines()[0].rstrip(".:") for e in (error, error.__cause__) if e is not None]  # these say it
    if ambiguous := re.match("Ambiguous value for argument '(.*)'", lines[0]):
        return f"{ambiguous[1]}: several values need -m, as in python main.py -m {shlex.join(typed)}"
    if advice := without_blanks(typed):
        return advice
    if hasattr(error, "override") and "=" in error.override:  # Hydra's grammar stumbled over this argument
        quotes = "a value with special characters stands in quotes: \"KEY='VALUE'\""
        return f"{error.override}: can't be read; brackets come in pairs, and {quotes}"
    return hint(typed, recipes) or value_needed(error, typed) or f"{', '.join(lines)}; {EXPLAINED}"


def without_blanks(typed: list[str]) -> str:
    """What to type in place of blanks beside an equals sign, which make several arguments of one; or empty."""
    match = re.search(r"(?:^|\0)([^\0=]+)(?:\0=\0?|=\0)([^\0=]+)(?:\0|$)", "\0".join(typed))
    return f"leave out the blanks around =: {shlex.quote(f'{match[1]}={match[2]}')}" if match else ""


def value_needed(error: BaseException, typed: list[str]) -> str:
    """Which values a key takes, where OmegaConf complains about the type of one; empty where it complains otherwise."""
    complaint = error.__cause__ or error  # Hydra hands it on
    if type(complaint).__name__ != "ValidationError":
        return ""
    name = str(complaint.full_key).partition("[")[0]  # type: ignore[attr-defined]
    group, _, key = name.partition(".")
    argument = next((word for word in reversed(typed) if word.lstrip("+").startswith(f"{name}=")), name)
    if not key:
        return f"{argument}: {group} is a group; its keys are {', '.join(KEYS.get(group, ()))}; {EXPLAINED}"
    kind = next(field.type for field in fields(getattr(Config(), group)) if field.name == key)
    kinds = [kind] if get_origin(kind) is tuple else get_args(kind) or [kind]
    return f"{argument}: must be {' or '.join(VALUES[kind] for kind in kinds)}; {EXPLAINED}"


def hint(typed: list[str], recipes: list[str]) -> str:
    """What to type in place of the first argument that names no key, in one line; empty where all name one.

    A wrong guess is worse than none: where no key of the group is much like what was typed, all of them are listed.
    """
    for argument, following in zip(typed, [*typed[1:], ""], strict=False):
        name, equals, value = argument.lstrip("-+~").partition("=")
        if not name or name.startswith("hydra."):
            continue
        if not equals:  # a blank in its place
            value = following if following and "=" not in following else "VALUE"
        group, _, key = name.replace("-", "_").rpartition(".")
        homes = [home for home in (group, *KEYS) if key in KEYS.get(home, ())]
        listed = ""
        if difflib.get_close_matches(name, ["recipe"], cutoff=0.7):
            close = [difflib.get_close_matches(part, recipes, 1) for part in value.split(",")]
            meant = f"+recipe={','.join(name for names in close for name in names) or 'NAME'}"
            listed = f" The recipes are {', '.join(recipes)};"
        elif homes:  # the right key, perhaps without its group, or as an option
            meant = f"{homes[0]}.{key}={value}"
        elif group in KEYS:
            close_keys = difflib.get_close_matches(key, KEYS[group], 1, cutoff=0.75)
            if not close_keys:
                return f"{argument}: {group} has no such key; its keys are {', '.join(KEYS[group])}; {EXPLAINED}"
            meant = f"{group}.{close_keys[0]}={value}"
        else:  # no group at all
            everywhere = {name: home for home, names in KEYS.items() for name in names}
            close_keys = difflib.get_close_matches(key, everywhere, 1, cutoff=0.8) if not group else []
            if not close_keys:
                continue
            meant = f"{everywhere[close_keys[0]]}.{close_keys[0]}={value}"
        if meant != argument:
            return f"{argument}: did you mean {shlex.quote(meant)}?{listed} {EXPLAINED}"
    return ""


def long_number(typed: list[str]) -> str:
    """Which argument is a number that Python can't read, or can't turn into a fraction; empty where none is."""
    for argument in typed:
        name, _, value = argument.partition("=")
        if re.fullmatch(r"[+-]?\d{21,}", value):
            return f"{name}: a number of {len(value.lstrip('+-'))} digits; at most 20 are allowed"
    return ""


def help_text() -> str:
    """What --help prints: the configuration file with its comments, and the recipes with their first lines."""
    keys = (PROJECT / "gpt2_train_cfg.yaml").read_text(encoding="utf-8")
    recipes = {path.stem: path.read_text(encoding="utf-8") for path in sorted((PROJECT / "recipes").glob("*.yaml"))}
    return "\n".join(
        [
            f"Keys (set any of them as group.key=value):\n\n{keys[keys.index('data_config:') : keys.index('hydra:')]}",
            "hydra.run.dir=DIR: the run directory; it holds the snapshots, the curves and main.log",
            "-m: values separated by commas are tried in turn, and compared",
            "--cfg job: print the resulting configuration, and end\n\nRecipes:\n",
            *(f"  +recipe={name:12} {text.splitlines()[0].lstrip('# ')}" for name, text in recipes.items()),
        ]
    )
