"""The validated form of a policy file.

The models say which keys there are, what they may hold and what they default to; the defaults are those of the policy
``delta`` (``policies/delta.yaml``), and a test keeps the two equal. Sizes are read by `delta.units` here, once.

Files and overrides are read by `delta.policies.loader`; errors in words of the keys are made by `delta.mistakes`. What
the keys *do* is in the parts they configure.
"""

import os
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, NoReturn, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from delta.errors import PolicyError
from delta.mistakes import did_you_mean, mistakes
from delta.parts import SHIPPED_PLANNERS, SHIPPED_SCORES, planner_names, score_names
from delta.types import Action, Cost, Leftover
from delta.units import Bytes, Share, parse_bytes, parse_share, parse_size


def _among(names: Callable[[], tuple[str, ...]], what: str) -> Callable[[str], str]:
    def check(given: str) -> str:
        if given not in names():
            hint = did_you_mean(given, names())
            raise ValueError(f"no {what} {given!r} is registered.{hint} Give one of {', '.join(names())}")
        return given

    return check


def _names_schema(shipped: tuple[str, ...]) -> WithJsonSchema:
    """An editor offers the shipped names, and takes others: a program may register parts of its own."""
    return WithJsonSchema({"anyOf": [{"enum": list(shipped)}, {"type": "string"}]})


ScoreName = Annotated[str, AfterValidator(_among(score_names, "score")), _names_schema(SHIPPED_SCORES)]
PlannerName = Annotated[str, AfterValidator(_among(planner_names, "planner")), _names_schema(SHIPPED_PLANNERS)]

# Without any of these a planner plans nothing. One that is not named here plans whatever is allowed.
PLANNED_ACTIONS = {
    "mimose": (Action.RECOMPUTE,),
    "optimal-checkpoint": (Action.RECOMPUTE,),
    "capuchin": (Action.SWAP, Action.RECOMPUTE),
}

_SIZE_PATTERN = r"^\s*[0-9][0-9_.eE+]*\s*([kKmMgGtT][iI]?)?[bB]?\s*$"
_SIZE_OR_SHARE_PATTERN = r"^\s*[0-9][0-9_.eE+]*\s*(([kKmMgGtT][iI]?)?[bB]?|%)\s*$"
_SHARE_TEXT = 'a share such as "5%"'
_SIZE_TEXT = 'a number of bytes, or a size such as "256MiB"'


def _read_bytes(value: Any, info: ValidationInfo) -> int:
    return parse_bytes(value, what=str(info.field_name), error=PolicyError)


def _read_size(value: Any, info: ValidationInfo) -> Bytes | Share:
    return parse_size(value, what=str(info.field_name), error=PolicyError)


def _read_share(value: Any, info: ValidationInfo) -> Share:
    return parse_share(value, what=str(info.field_name), error=PolicyError)


def _read_window(value: Any, info: ValidationInfo) -> Any:
    if value == "auto":
        return value
    try:
        return _read_bytes(value, info)
    except PolicyError as error:
        raise PolicyError(f'{error} Or give "auto".') from None


def _write_size(size: Bytes | Share) -> int | str:
    return size.nbytes if isinstance(size, Bytes) else str(size)


def _size_schema(pattern: str, text: str, *also: dict[str, Any]) -> WithJsonSchema:
    forms = [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": pattern}, *also]
    return WithJsonSchema({"anyOf": forms, "description": text})


NumBytes = Annotated[int, BeforeValidator(_read_bytes), _size_schema(_SIZE_PATTERN, _SIZE_TEXT)]
Size = Annotated[
    Bytes | Share,
    BeforeValidator(_read_size),
    PlainSerializer(_write_size),
    _size_schema(_SIZE_OR_SHARE_PATTERN, _SIZE_TEXT + ', or a share such as "50%"'),
]
OnlyShare = Annotated[
    Share,
    BeforeValidator(_read_share),
    PlainSerializer(str),
    WithJsonSchema({"type": "string", "pattern": r"^\s*[0-9][0-9_.eE+]*\s*%\s*$", "description": _SHARE_TEXT}),
]
Window = Annotated[
    Literal["auto"] | int,
    BeforeValidator(_read_window),
    _size_schema(_SIZE_PATTERN, _SIZE_TEXT + ', or "auto"', {"const": "auto"}),
]


def _no_duplicates(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    twice = sorted({action for action in actions if actions.count(action) > 1})
    if twice:
        raise ValueError(f"each action may be named once, {', '.join(twice)} is there more often")
    return actions


Actions = Annotated[tuple[Action, ...], Field(min_length=1), AfterValidator(_no_duplicates)]


def _spill_dir(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


class _Model(BaseModel):
    """Frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise PolicyError(
            f"{name}={value!r}: a policy cannot be changed. Make another: delta.load_policy(name, overrides={{...}})."
        )


class FilterConfig(_Model):
    """Which storages may go, and in what order."""

    score: ScoreName = Field(default="delta", description="ranks the candidates; the smallest score is evicted first")
    cost: Cost = Field(default=Cost.ACTION, description="what the score counts as the cost of evicting a storage")
    choose: Literal["one", "window"] = Field(
        default="one",
        description="one: the first in the order of the score; window: neighbours in memory that are cheapest together",
    )
    min_bytes: NumBytes = Field(default=2**20, description="a storage smaller than this is never evicted")


class PlacementConfig(_Model):
    """Where in memory results go, on a device that lets the policy choose."""

    left: tuple[str, ...] = Field(
        default=(),
        description="globs over op names: what these make is cut from the left end of a free block, all else from the "
        "right; empty: everything from the left",
    )


class DirectorConfig(_Model):
    """How a storage goes."""

    actions: Actions = Field(
        default=(Action.KEEP, Action.SWAP, Action.RECOMPUTE),
        description="what may be done with a saved tensor; the cheapest of them that is possible is taken",
    )


class PlannerConfig(_Model):
    """What happens once a step has been seen from start to end."""

    kind: PlannerName = Field(
        default="profile",
        description="which planner plans the next step from the last ones; none: decide online always",
    )
    observe: int = Field(
        default=3,
        ge=1,
        strict=True,
        description="mimose: input sizes that are observed before others are predicted from them",
    )
    rounding: OnlyShare = Field(
        default=Share(0.05),
        description="mimose: a plan serves input sizes that are smaller by at most this share",
        json_schema_extra={"default": "5%"},
    )
    buffer: Size = Field(
        default=Share(0.02),
        description="mimose: part of the budget that plans leave unused",
        json_schema_extra={"default": "2%"},
    )
    time_limit_s: float = Field(
        default=20.0,
        gt=0,
        strict=True,
        allow_inf_nan=False,
        description="seconds that kind monet may search for a plan; other kinds ignore it",
    )
    gap: float = Field(
        default=0.05,
        ge=0,
        le=1,
        strict=True,
        description="kind monet searches until its plan costs at most this share more than the best; other kinds "
        "ignore it",
    )


class ReplayConfig(_Model):
    """What is kept beside the saved tensors for the sake of replays."""

    sources: Leftover = Field(
        default=Leftover.HOLD,
        description="storages the program is done with but the recipe of a dropped one reads: hold, or drop at once",
    )
    results: Leftover = Field(
        default=Leftover.DROP,
        description="what a replay makes on its way and nothing has saved: drop after its last reader, or hold",
    )


class PrefetchConfig(_Model):
    """When swapped storages come back."""

    window: Window = Field(
        default="auto",
        description="bytes that may be on their way back at once; auto: as many as the limit has room for; 0 turns "
        "prefetch off",
    )


class BackwardConfig(_Model):
    """How the program's backward runs."""

    split_convolutions: bool = Field(
        default=False,
        description="compute a convolution's weight gradient before its input's, and let go of the input in between",
    )


class HostConfig(_Model):
    """Where swapped storages are kept."""

    limit: Size = Field(
        default=Share(0.5),
        description="room on the host for swapped storages; a share is one of the memory available when the block is "
        "entered (CUDA), or of the free disk (CPU)",
        json_schema_extra={"default": "50%"},
    )
    spill_dir: Annotated[str | None, BeforeValidator(_spill_dir)] = Field(
        default=None,
        description="directory of the spill file; null: the directory for temporary files (CPU), no spill file (CUDA)",
    )


class BudgetConfig(_Model):
    """How the budget is held."""

    reserve: Size = Field(
        default=Share(0.03),
        description="part of the budget that is left free for what cannot be foreseen",
        json_schema_extra={"default": "3%"},
    )
    strict: bool = Field(
        default=False, description="a budget that cannot be held is an error (true) or a warning (false)"
    )


class Rule(_Model):
    """An exception: ops that match are always treated so. ``op`` and ``module`` are globs, at least one is given."""

    op: str | None = Field(default=None, min_length=1, description='glob over op names, such as "aten._softmax*"')
    module: str | None = Field(default=None, min_length=1, description='glob over module names, such as "*.attention"')
    action: Action

    @model_validator(mode="after")
    def _has_a_pattern(self) -> Self:
        if self.op is None and self.module is None:
            raise ValueError("a rule needs `op` or `module`, otherwise it would match everything")
        return self

    def matches(self, op: str, module: str) -> bool:
        """Whether both globs fit; a glob that is not given fits everything. An unknown module name is ``""``."""
        fits_op = self.op is None or fnmatchcase(op, self.op)
        return fits_op and (self.module is None or fnmatchcase(module, self.module))


class Policy(_Model):
    """One policy, ready for the engine. Every key but the name has a default: that of the shipped policy ``delta``."""

    name: str = Field(min_length=1, description="the name in reports; for a shipped policy, the file's name")
    summary: str = Field(default="", description="one line for lists")
    source: str = Field(default="", description="the paper the policy comes from")
    filter: FilterConfig = FilterConfig()
    placement: PlacementConfig = PlacementConfig()
    director: DirectorConfig = DirectorConfig()
    planner: PlannerConfig = PlannerConfig()
    replay: ReplayConfig = ReplayConfig()
    prefetch: PrefetchConfig = PrefetchConfig()
    backward: BackwardConfig = BackwardConfig()
    host: HostConfig = HostConfig()
    budget: BudgetConfig = BudgetConfig()
    rules: tuple[Rule, ...] = Field(default=(), description="exceptions, the first one that matches counts")

    def __init__(self, /, **values: Any) -> None:
        """Of the keys and sections of a policy file: ``Policy(name="mine", filter={"score": "lru"})``.

        Raises PolicyError, with a line for each mistake.
        """
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise PolicyError("\n".join(mistakes(error, Policy))) from None

    @model_validator(mode="after")
    def _pairs_make_sense(self) -> Self:
        actions = self.director.actions
        if self.filter.choose == "window" and self.filter.score != "coop":
            raise ValueError(
                f"filter.choose=window sums the scores of neighbours, and those of filter.score={self.filter.score} "
                "make no sum: set filter.score to coop, or filter.choose to one"
            )
        if self.planner.kind != "none" and set(actions) == {Action.KEEP}:
            raise ValueError(
                f"planner.kind={self.planner.kind} has nothing to plan while director.actions holds only keep: "
                "set planner.kind to none, or add swap, recompute or encode to director.actions"
            )
        planned = PLANNED_ACTIONS.get(self.planner.kind, actions)
        if not set(planned) & set(actions):
            ways = " or ".join(planned)
            raise ValueError(
                f"planner.kind={self.planner.kind} decides what to {ways}, and director.actions does not allow that: "
                f"set planner.kind to profile, or add {ways} to director.actions"
            )
        for number, rule in enumerate(self.rules):
            if rule.action not in {Action.KEEP, *actions}:
                raise ValueError(
                    f"rules.{number}.action={rule.action} is not among director.actions ({', '.join(actions)}): "
                    f"add {rule.action} there or change the rule"
                )
        return self

    def splits(self, nbytes: int) -> bool:
        """Whether the backward of a convolution with an input of that size is split."""
        return self.backward.split_convolutions and nbytes >= self.filter.min_bytes

    def rule_for(self, op: str, module: str = "") -> Action | None:
        """The action of the first rule that matches, or None."""
        return next((rule.action for rule in self.rules if rule.matches(op, module)), None)
