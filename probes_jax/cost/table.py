"""An inspection as text."""

from __future__ import annotations

from probes_jax.cost.inspection import Cost, Inspection

_HEAD = ("", "collectives", "in loops", "memory traffic", "temporary", "payload", "series", "compile")
_ADVICE = (
    "a tensor is sharded in another way than guessed; annotate it in the model, or set Plan token_axes and feature_axes"
)
_USUAL = 2  # collectives: one of sums, one of maxima


def table(found: Inspection) -> str:
    """What the plain step costs, what each program and each of its parts adds, and what to mend."""
    rows = [_HEAD, ("plain step", *_cells(found.programs["off"].cost))]
    for program in found.programs:
        if program == "off":
            continue
        rows.append((f"{program} adds", *_added(found, program, found.added(program))))
        for part, cost in found.parts.get(program, {}).items():
            rows.append((f"  of it {part}", *_added(found, program, cost)[:-1], ""))  # too noisy: single compiles
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = [f"For {found.devices} x {found.device}, on each device; a full step every {found.scan_every}:"]
    lines += ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    if {"light", "full"} <= set(found.programs):
        lines.append(f"On average over {found.scan_every} steps: memory traffic {found.average():+.2%}")
    for program in found.programs:
        exchanges = found.exchanges(program) if program != "off" else ()
        added = found.added(program) if exchanges else None
        for each in exchanges:  # where XLA has only joined them to what there was, they cost nothing of their own
            if added and (added.looped > 0 if each.looped else added.collectives > _USUAL):
                what = f"{each.op} of {', '.join(each.arrays)}, from {each.source or '?'}"
                lines.append(f"{program}: {what}" + (f", in a loop: {_ADVICE}" if each.looped else ""))
    return "\n".join(lines)


def _cells(cost: Cost) -> tuple[str, ...]:
    return (
        str(cost.collectives),
        str(cost.looped),
        _size(cost.bytes),
        _size(cost.temporary),
        _size(cost.payload),
        str(cost.series),
        f"{cost.compile_seconds:.1f} s",
    )


def _added(found: Inspection, program: str, cost: Cost) -> tuple[str, ...]:
    plain = found.programs["off"].cost

    def share(what: str) -> str:
        whole = getattr(plain, what)
        return f" ({getattr(cost, what) / whole:+.1%})" if whole else ""

    cells = _cells(cost)
    return (*cells[:2], cells[2] + share("bytes"), cells[3] + share("temporary"), *cells[4:])


def _size(count: int) -> str:
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while abs(value) >= 1000 and len(units) > 1:
        value /= 1000
        del units[0]
    return f"{value:.3g} {units[0]}"
