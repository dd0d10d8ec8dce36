"""What is measured, when, and with which thresholds."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable
from typing import Any

from probes_jax.spec import check


@dataclasses.dataclass(frozen=True)
class Guard:
    """Skips an update exactly: parameters and optimizer state stay as they were.

    It decides on loss and gradient, before there is an update. An update that is not finite though both are (too large
    a learning rate) is applied, counted in `alert/nonfinite_accepted`, which is an alarm, and ruins the next loss.

    Attributes:
        nonfinite: Skip when the loss or a gradient element is NaN or infinite.
        co_spike: Skip when loss and gradient norm both spike (the detectors' `theta`).
        max_consecutive: After this many skips in a row the guard stops the run: it skips every later update, too.
    """

    nonfinite: bool = True
    co_spike: bool = False
    max_consecutive: int = 50

    def __post_init__(self) -> None:
        check.flag("Guard nonfinite", self.nonfinite)
        check.flag("Guard co_spike", self.co_spike)
        object.__setattr__(self, "max_consecutive", check.integer("Guard max_consecutive", self.max_consecutive, 1))
        if not (self.nonfinite or self.co_spike):
            raise ValueError(
                "Guard(nonfinite=False, co_spike=False) guards nothing; set one of them, or pass guard=None"
            )


MORE = ("residual", "attention", "replica", "second_moment", "noise")  # measured where a plan asks for it
FAMILIES = ("act", "grad_act", "grad", "param", "update", "logits", "router", *MORE)  # what a plan can do without


def _with(settings: dict[str, Any], **preset: tuple[str, ...]) -> dict[str, Any]:
    """The settings with a preset's families before the user's own, each once; what is left out is not asked for."""
    found = dict(settings)
    for name, families in preset.items():
        given = check.names(f"Plan {name}", settings.get(name, ()))
        found[name] = tuple(dict.fromkeys((*families, *given)))
    without = found.get("without", ())
    found["more"] = tuple(family for family in found["more"] if family not in without)
    return found


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured, when, and with which thresholds. Checked when built.

    Attributes:
        groups: Names of the data sources or modalities behind `Loss.group`; id `i` is `groups[i]`, any other id
            counts as `other`.
        scan_every: Steps between tensor scans (the `full` program); step 0 scans.
        window: Length of the spike detectors' window, in steps.
        min_history: Values the window must hold before a spike score exists.
        deviation_floor: Floor of the deviation D, in log units.
        theta: Spike score above which a step is a spike.
        clip_window: Steps over which the clip rate is taken.
        guard: Skips bad updates; None never skips.
        skip_empty: Leave the state untouched by a batch without a valid token.
        precision: Measure, in steps that scan, what each activation, its gradient and each parameter's gradient would
            lose in bfloat16 and in both 8-bit formats, and their kurtosis.
        embeddings: Regular expression on the parameter path; zero fractions of these gradients are reported apart.
        backward: Measure the gradients of the observed activations, too, where the activations are measured.
        include: Which activations are observed: regular expressions on the point name, or `role:` and a role
            (`role:query`); empty means all. A name is matched with the numbers of layers and without
            (`blocks[*]/mlp` of scanned layers, `blocks[2]/mlp` of others, `blocks/mlp`), and as tables write them:
            `blocks[0..2]/mlp`. A word that matches nothing is an error.
        exclude: The same, for those that are not observed. A word that matches nothing is named by the coverage.
        without: Families of metrics that are not measured, to save what they cost (`pj.inspect` says what that is):
            `act` (activations), `grad_act` (their gradients, as `backward=False` does), `grad` and `update` (each
            layer's own: the totals stay, detectors need them), `param` (norms of the parameters, and with them the
            update ratios), `logits`, `router` (balance of experts), and those of `more`.
        more: Families that are measured besides, in steps that scan: `residual` (what each branch does to the residual
            stream), `attention` (largest logit and entropy), `replica` (whether the copies of a tensor on several
            devices are the same), `second_moment` (the spread of the optimizer's), `noise` (the gradient noise scale).
        roles: (regular expression on the point name, role) pairs, for points whose role is not known by itself.
        token_axes: Mesh axes that shard tokens. None: found from the batch's sharding.
        feature_axes: Mesh axes that shard the features of activations. None: found from the parameters' shardings. A
            wrong guess of either costs a small collective (`pj.inspect` shows it), never a wrong number.
        modalities: Names of the modalities that `Loss.modality` tells apart, the text first.
        encoder: Regular expression on the parameter path: what belongs to the encoder of another modality; its share of
            the gradient is reported.
        top_k: Experts that a token goes to, where the model's routers return a score for each expert and nothing else.
        expert_shards: Into how many shards of neighbouring experts these are cut, where the parameters' shardings do
            not tell.
        unit: What one element of `Loss.nll` is, in the singular: "token", "example", "pixel". Tables say it where
            they give units; the names of metrics stay.
        stages: In steps that scan, measure what each named stage of `pj.chain` makes of the gradient.
        max_series: Series that the online writers (event files, a CLU writer) get at most. Those of single layers go to
            the run folder's store only; of the others P2 and then P1 too, by whole families, where there are more. P0
            is never left out.
        max_payload: Bytes of one full report above which a line in the log says which families they are. Nothing is
            left out for it.
    """

    groups: tuple[str, ...] = ()
    scan_every: int = 100
    window: int = 128
    min_history: int = 32
    deviation_floor: float = 3e-3
    theta: float = 6.0
    clip_window: int = 128
    guard: Guard | None = None
    skip_empty: bool = False
    precision: bool = False
    embeddings: str = r"(?i)embed|(^|/)wte|(^|/)wpe"
    backward: bool = True
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    roles: tuple[tuple[str, str], ...] = ()
    token_axes: tuple[str, ...] | None = None
    feature_axes: tuple[str, ...] | None = None
    modalities: tuple[str, ...] = ()
    encoder: str | None = None
    top_k: int | None = None
    expert_shards: int | None = None
    unit: str = "token"
    stages: bool = False
    max_series: int = 2000
    max_payload: int = 1_000_000

    def __post_init__(self) -> None:
        for name in (
            "groups",
            "modalities",
            "include",
            "exclude",
            "without",
            "more",
            *(name for name in ("token_axes", "feature_axes") if getattr(self, name) is not None),
        ):
            self._set(name, check.names(f"Plan {name}", getattr(self, name)))
        for name, least in (
            ("scan_every", 1),
            ("window", 2),
            ("min_history", 2),
            ("clip_window", 1),
            ("max_series", 1),
            ("max_payload", 1),
        ):
            self._set(name, check.integer(f"Plan {name}", getattr(self, name), least))
        for name in ("top_k", "expert_shards"):
            if getattr(self, name) is not None:
                self._set(name, check.integer(f"Plan {name}", getattr(self, name), 1))
        for name in ("deviation_floor", "theta"):
            self._set(name, check.number(f"Plan {name}", getattr(self, name)))
        check.flag("Plan skip_empty", self.skip_empty)
        check.flag("Plan precision", self.precision)
        check.flag("Plan backward", self.backward)
        check.flag("Plan stages", self.stages)
        check.pattern("Plan embeddings", self.embeddings)
        if self.encoder is not None:
            check.pattern("Plan encoder", self.encoder)
        self._set("roles", check.roles("Plan roles", self.roles))
        for name in ("include", "exclude"):
            for text in getattr(self, name):
                check.chosen(f"Plan {name}", text, tuple(role for _, role in self.roles))
        for family in self.without:
            if family not in FAMILIES:
                raise ValueError(f"Plan without names the family {family!r}; a plan can do without {FAMILIES}")
        for family in self.more:
            if family not in MORE:
                raise ValueError(f"Plan more names the family {family!r}; a plan can have more of {MORE}")
        if "grad_act" in self.without:
            self._set("backward", False)
        if not isinstance(self.unit, str) or not re.fullmatch(r"[a-z]+", self.unit):
            raise ValueError(f'Plan unit must be one word such as "token" or "example", got {self.unit!r}')
        if self.guard is not None and not isinstance(self.guard, Guard):
            raise ValueError(f"Plan guard must be a Guard or None, got {self.guard!r}; write guard=Guard()")
        self._check_groups()
        if self.min_history > self.window:
            raise ValueError(
                f"Plan min_history ({self.min_history}) exceeds window ({self.window}); no score could exist"
            )

    def _check_groups(self) -> None:
        for what in ("group", "modality"):
            names = self.groups if what == "group" else self.modalities
            for name in names:
                if not re.fullmatch(r"[^/\[\]{}\s]+", name):
                    raise ValueError(
                        f"Plan {what} {name!r}: a name may not be empty or hold '/', brackets, braces or spaces"
                    )
            if len(set(names)) < len(names) or (what == "group" and "other" in names):
                raise ValueError(
                    f"Plan names of {what} must be unique, and no group 'other' (it is kept for unknown ids): {names}"
                )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def first_screen(cls, **settings: Any) -> Plan:
        """What can page: every-step metrics, and of scans activations, branches and copies, for their worst values.

        Args:
            **settings: Any others of a plan. Families of `more` and `without` come on top of the preset's.
        """
        return cls(**_with(settings, more=("residual", "replica"), without=("grad_act", "grad", "update")))

    @classmethod
    def diagnose(cls, **settings: Any) -> Plan:
        """What to open when a signal moves: every family, every layer, forward and backward, every 100 steps.

        Args:
            **settings: Any others of a plan. Families of `without` are left out.
        """
        return cls(**_with(settings, more=MORE))

    @classmethod
    def forensics(cls, points: Iterable[str] = (), **settings: Any) -> Plan:
        """One investigation: also low precision, kurtosis and the stages of the optimizer, every ten steps.

        Args:
            points: Which activations, as `include`; empty means all. What is of parameters, branches and attention
                stays that of all layers.
            **settings: Any others of a plan. Families of `without` are left out.

        Raises:
            ValueError: `points` is one string, or there is an `include` beside it.
        """
        chosen = check.names("Plan.forensics points", points)
        if chosen and "include" in settings:
            raise ValueError("Plan.forensics was given points and include, which are the same; pass one of them")
        own = {"include": chosen} if chosen else {}
        own |= {"precision": True, "stages": True, "scan_every": 10}
        return cls(**{**own, **_with(settings, more=MORE)})

    @property
    def left_out(self) -> tuple[str, ...]:
        """Families that are not measured."""
        return (*self.without, *(family for family in MORE if family not in self.more))

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits that change with any setting."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:12]
