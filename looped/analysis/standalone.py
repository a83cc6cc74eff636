"""A drawing as a file of its own, in the report's colours, light or dark as the reader's system is."""

from __future__ import annotations

import re

from looped.analysis.style import STYLE
from looped.analysis.svg import Svg

_COLOURS = re.compile(r":root \{[^}]*\}|@media \(prefers-color-scheme: dark\) \{\s*:root \{[^}]*\}\s*\}")
_SHAPES = re.compile(r"text|\.(grid|series|mark|error|axis|bound)")


def standalone(svg: Svg) -> str:
    """The drawing on the page's colour, with its style sheet inside."""
    head, body = str(svg).split(">", 1)
    page = f'<rect width="{svg.width:g}" height="{svg.height:g}" style="fill:var(--page)"/>'
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{_style()}</style>{page}{body}'


def _style() -> str:
    """Of the report's style sheet, its colours and the shapes of charts."""
    colours: list[str] = _COLOURS.findall(STYLE)
    return "\n".join([*colours, *(line for line in STYLE.splitlines() if _SHAPES.match(line))])
