"""Figures made part of the page: ids of their own, colours that follow the page into dark mode, and nothing but drawing in them."""

import xml.etree.ElementTree as ElementTree

from markupsafe import Markup

from dualtrack.reporting.figure_style import CANDIDATE, CARD, GRID, INK, LIMIT, MUTED, REFERENCE, SECOND, THIRD

_SVG, _XLINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"
_DRAWING = {
    "svg",
    "g",
    "path",
    "use",
    "defs",
    "text",
    "tspan",
    "clipPath",
    "rect",
    "line",
    "polyline",
    "polygon",
    "circle",
}
_VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    CARD: "card",
    REFERENCE: "reference",
    CANDIDATE: "candidate",
    SECOND: "second",
    THIRD: "third",
    LIMIT: "limit",
}


def inline_svg(svg: str, prefix: str, alternative_text: str) -> Markup:
    """Return an SVG of ours as an element of an HTML page.

    Args:
        svg: What `save_figure` wrote. Elements and attributes that do not draw are dropped, whatever the file says.
        prefix: Put before every id, so that many figures live in one page.
        alternative_text: What a screen reader says.

    Raises:
        ValueError: `svg` is not well-formed.
    """
    try:
        root = ElementTree.fromstring(svg)
    except ElementTree.ParseError as error:
        raise ValueError(
            f"figure {prefix}: expected an SVG, found something that can't be parsed ({error}); build the figure again"
        ) from error
    _clean(root, prefix)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.attrib.update({"role": "img", "aria-label": alternative_text, "focusable": "false"})
    # the serializer escapes text and attributes; only names from the list above are left
    return Markup(ElementTree.tostring(root, encoding="unicode", short_empty_elements=True))


def title_of(svg: str) -> str:
    """Return the title that `save_figure` wrote into an SVG, or a plain word where it is missing."""
    try:
        found = ElementTree.fromstring(svg).find(".//{http://purl.org/dc/elements/1.1/}title")
    except ElementTree.ParseError:
        found = None
    return found.text if found is not None and found.text else "Figure"


def _clean(element: ElementTree.Element, prefix: str) -> None:
    element.tag = element.tag.removeprefix(_SVG)
    kept = {}
    for name, value in element.attrib.items():
        plain = name.removeprefix(_XLINK)
        if plain == "id":
            kept[plain] = f"{prefix}-{value}"
        elif plain == "href" and value.startswith("#"):
            kept[plain] = f"#{prefix}-{value[1:]}"
        elif plain == "clip-path":
            kept[plain] = value.replace("url(#", f"url(#{prefix}-")
        elif plain == "style" and "url(" not in value:
            kept[plain] = _themed(value)
        elif ":" not in plain and "{" not in plain and plain not in ("href", "style") and not plain.startswith("on"):
            kept[plain] = value
    element.attrib.clear()
    element.attrib.update(kept)
    for child in list(element):
        if child.tag.removeprefix(_SVG) not in _DRAWING:
            element.remove(child)
        else:
            _clean(child, prefix)


def _themed(style: str) -> str:
    for color, variable in _VARIABLES.items():
        style = style.replace(color, f"var(--{variable})")
    return style.replace("font-family: 'DejaVu Sans'", "font-family: inherit")
