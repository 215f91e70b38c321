"""A lineage as a picture: a checkpoint, what it was made from, and the data of every stage on the way, with short digests."""

from __future__ import annotations

from html import escape

from evaluation.dag import HEIGHT, WIDTH, draw
from rlhf_core.lineage import Ancestor, Dataset, nodes
from rlhf_core.stage import digest as short

SHORT = 10  # hex digits of a digest
COLOURS = {"data": "#b7791f", "hub": "#6b46c1", "folder": "#6b46c1", "file": "#b7791f", "unknown": "#c0392b"}
STAGE = "#2f7d4f"


def family_svg(ancestor: Ancestor, data: list[Dataset]) -> str:
    """A whole SVG document, from the origins on the left to the checkpoint on the right. `data`: as `rlhf_core.lineage.data_of` tells."""
    keys: dict[int, str] = {}
    notes: dict[str, tuple[str, str]] = {}  # by key: kind, digest
    parents: dict[str, list[str]] = {}

    def new(name: str, kind: str, digest: str) -> str:
        key, number = name, 1
        while key in notes:
            number += 1
            key = f"{name} ({number})"
        notes[key], parents[key] = (kind, digest), []
        return key

    sets: dict[tuple[str, str], str] = {}
    for item in data:
        if (item.name, item.digest) not in sets:
            sets[item.name, item.digest] = new(item.name, "data", item.digest)
    for node in nodes(ancestor):
        key = keys[id(node)] = new(node.name, node.kind, node.digest)
        used = [sets[item.name, item.digest] for item in data if node.is_stage and item.stage == node.name]
        parents[key] = list(dict.fromkeys([*(keys[id(parent)] for _, parent in node.parents if id(parent) in keys), *used]))
    drawing = draw(parents)
    size = f"{drawing.width:.0f} {drawing.height:.0f}"
    tip = f"tip-{short(ancestor.name + ancestor.digest)}"  # several pictures may stand on one page
    marker = f'<marker id="{tip}" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="lineage of {escape(ancestor.name)}" viewBox="0 0 {size}" '
        f'style="max-width: {drawing.width:.0f}px" font-family="system-ui, sans-serif">',
        f'<defs>{marker}<path d="M0 .8L8 4L0 7.2z" fill="#8b98a5"/></marker></defs>',
    ]
    for edge in drawing.edges:
        end = f' marker-end="url(#{tip})"' if edge.arrow else ""
        parts.append(f'<path d="{edge.path}" fill="none" stroke="#b4bec8" stroke-width="1.4"{end}/>')
    for box in drawing.boxes:
        kind, digest = notes[box.name]
        colour = COLOURS.get(kind, STAGE)
        title = f"{box.name} ({kind.replace('_', ' ')}) {digest}".strip()
        parts += [
            f'<g transform="translate({box.x:.1f},{box.y:.1f})"><title>{escape(title)}</title>',
            f'<rect width="{WIDTH:g}" height="{HEIGHT:g}" rx="8" fill="#fff" stroke="{colour}" stroke-width="1.3"/>',
        ]
        for row, line in enumerate(box.lines):
            parts.append(f'<text x="8" y="{17 + 13.5 * row:g}" font-size="11.5" font-weight="600" fill="#1f2933">{escape(line)}</text>')
        told = digest[:SHORT] or {"data": "not here", "hub": "Hub, no commit"}.get(kind, kind.replace("_", " "))
        parts.append(f'<text x="8" y="{HEIGHT - 8:g}" font-size="10" fill="#5f6c78">{escape(told)}</text></g>')
    return "\n".join([*parts, "</svg>"]) + "\n"
