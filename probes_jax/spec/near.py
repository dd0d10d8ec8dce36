"""Names that come close to one that is not there."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MOST = 3  # of each kind


def near_names(name: str, known: Iterable[str]) -> list[str]:
    """Those of the known names that may have been meant, the likeliest first; empty where none comes close.

    What lies below the name comes first, then what holds it as a part, then what is spelled much like it.

    >>> near_names("learning", ["loss/mean", "opt/learning_rate"]), near_names("grad/nrm", ["grad/norm", "loss/mean"])
    (['opt/learning_rate'], ['grad/norm'])
    """
    known = list(known)
    below = [other for other in known if other.startswith(f"{name}/")]
    holding = [other for other in known if name and name in other]
    near = [*sorted(below, key=len)[:_MOST], *sorted(holding, key=len)[:_MOST]]
    return list(dict.fromkeys([*near, *difflib.get_close_matches(name, known, _MOST)]))
