"""An inspection as text."""

from __future__ import annotations

from probes_jax.cost.inspection import Cost, Inspection

_HEAD = ("", "collectives", "in loops", "memory traffic", "temporary", "payload", "series", "compile")
_ADVICE = (
    "a tensor is sharded in another way than guessed; annotate it in the model, or set Plan token_axes and feature_axes"
)


def table(found: Inspection) -> str:
    """What the plain step costs, what each program and each of its parts adds, and what to mend."""
    rows = [_HEAD, ("plain step", *_cells(found.programs["off"].cost))]
    for program in found.programs:
        if program == "off":
            continue
        rows.append((f"{program} adds", *_added(found, program, found.added(program))))
        for part, cost in found.parts.get(program, {}).items():
            rows.append((f"  of it {part}", *_added(found, program, cost)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = [f"For {found.devices} x {found.device}, on each device; a full step every {found.scan_every}:"]
    lines += ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    for program in found.programs:
        for each in found.exchanges(program) if program != "off" else ():
            if not each.looped:
                continue
            lines.append(
                f"{program}: {each.op} of {', '.join(each.arrays)} in a loop, from {each.source or '?'}: {_ADVICE}"
            )
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
