"""Colours of charts, as CSS writes them. Stdlib only."""

GREEN, ORANGE, BLUE, PURPLE, OLIVE, RED, CYAN, BROWN = CYCLE = (
    "#14655f", "#d1702a", "#4a6fb5", "#9a4f96", "#8a8d1f", "#b3372f", "#3c9bb0", "#7a6a58",
)  # fmt: skip
GREY = "#d9d5cb"
AMBER = "#e0892f"
INK = "#1d2328"
MUTED = "#5d6871"
