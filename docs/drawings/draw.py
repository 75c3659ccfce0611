"""Draws docs/drawings/*.svg: ``python docs/drawings/draw.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

#: Light ground and dark ink of their own: readable on light and on dark pages.
GROUND, INK, FAINT = "#fbfbf8", "#22262b", "#c9ccd1"
#: One for each thread of a quad, each edge, each slice.
COLOURS = ("#8ecae6", "#ffb703", "#90be6d", "#f28482")
CELL = 26


class Drawing:
    """Boxes, texts and arrows on a ground."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
            f' font-family="sans-serif" font-size="13" role="img" aria-label="{title}">',
            f'<rect width="{width}" height="{height}" rx="8" fill="{GROUND}"/>',
        ]

    def box(self, x: float, y: float, text: object = "", fill: str = "white", wide: float = CELL) -> None:
        """A cell with a text in its middle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{CELL}" fill="{fill}" stroke="{INK}"/>'
        )
        if text != "":
            self.text(x + wide / 2, y + 18, text, "middle")

    def text(self, x: float, y: float, text: object, anchor: str = "start", bold: bool = False) -> None:
        """A line of text."""
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{INK}"{weight}>{text}</text>'
        )

    def line(self, *points: tuple[float, float], arrow: bool = True) -> None:
        """A line, with a head at its end."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{INK}"/>')
        if arrow:
            (x0, y0), (x, y) = points[-2:]
            length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5
            dx, dy = 7 * (x - x0) / length, 7 * (y - y0) / length
            head = (
                f"{x:g},{y:g} {x - dx - dy / 2:g},{y - dy + dx / 2:g} {x - dx + dy / 2:g},{y - dy - dx / 2:g}"
            )
            self.parts.append(f'<polygon points="{head}" fill="{INK}"/>')

    def cells(
        self, x: float, y: float, rows: Sequence[Sequence[object]], fill: Callable[[int, int], str]
    ) -> None:
        """A matrix of cells."""
        for i, row in enumerate(rows):
            for j, text in enumerate(row):
                self.box(x + j * CELL, y + i * CELL, text, fill(i, j))

    def svg(self) -> str:
        """The finished file."""
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def adjacency() -> str:
    """Three nodes, four edges: the graph, its matrix, what is stored."""
    edges = ((2, 0), (0, 1), (0, 2), (2, 2))
    drawing = Drawing(720, 190, "A graph, its matrix, and the arrays that hold it")
    places = {0: (60, 70), 1: (60, 150), 2: (160, 110)}
    drawing.text(20, 26, "edges of the caller, 0 to 3", bold=True)
    for row, col in edges:
        if row != col:
            (x0, y0), (x1, y1) = places[col], places[row]
            bend = 7 if {row, col} == {0, 2} else 0  # two directions, side by side
            length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
            ux, uy = (x1 - x0) / length, (y1 - y0) / length
            start = (x0 + 16 * ux - bend * uy, y0 + 16 * uy + bend * ux)
            end = (x1 - 16 * ux - bend * uy, y1 - 16 * uy + bend * ux)
            drawing.line(start, end)
    drawing.line((173, 102), (190, 92), (202, 98), (205, 110), (202, 122), (190, 128), (176, 120))
    labels = {0: (122, 76), 1: (46, 116), 2: (92, 112), 3: (216, 115)}
    for edge, (x, y) in labels.items():
        drawing.text(x, y, edge, "middle", bold=True)
    for node, (x, y) in places.items():
        drawing.parts.append(f'<circle cx="{x}" cy="{y}" r="15" fill="white" stroke="{INK}"/>')
        drawing.text(x, y + 5, node, "middle")
    drawing.text(270, 26, "matrix, rows: destinations", bold=True)
    for k in range(3):
        drawing.text(326 + k * CELL, 62, k, "middle")
        drawing.text(300, 88 + k * CELL, k, "middle")
    cells: list[list[object]] = [[""] * 3 for _ in range(3)]
    for edge, (row, col) in enumerate(edges):
        cells[row][col] = edge
    drawing.cells(313, 70, cells, lambda i, j: COLOURS[cells[i][j]] if cells[i][j] != "" else "white")
    drawing.text(535, 26, "Adjacency", bold=True)
    for y, (name, values) in zip(
        (50, 90, 130),
        (("rowptr", (0, 2, 2, 4)), ("col", (1, 2, 0, 2)), ("edge_id", (1, 2, 0, 3))),
        strict=True,
    ):
        drawing.text(520, y + 18, name, "end")
        for k, value in enumerate(values):
            drawing.box(535 + k * CELL, y, value, "white" if name == "rowptr" else COLOURS[(1, 2, 0, 3)[k]])
    return drawing.svg()


def slices() -> str:
    """Rows of unlike length, cut into slices; partial sums of the long one."""
    lengths = (2, 9, 1, 4, 3)
    most = 4
    drawing = Drawing(760, 235, "Rows are cut into slices of bounded length")
    drawing.text(20, 26, "rows, their entries", bold=True)
    work = []
    for i, length in enumerate(lengths):
        y = 42 + i * 34
        drawing.text(28, y + 18, i, "middle")
        for k in range(length):
            drawing.box(45 + k * 24, y, "", COLOURS[k // most % 4], 24)
        work += [(min(most, length - at), i, at // most) for at in range(0, length, most)]
    work.sort(key=lambda item: -item[0])
    drawing.line((285, 120), (325, 120))
    drawing.text(340, 26, "work list, by length", bold=True)
    for place, (length, row, part) in enumerate(work):
        y = 40 + place * 27
        drawing.text(352, y + 18, row, "middle")
        for k in range(length):
            drawing.box(370 + k * 24, y, "", COLOURS[part % 4], 24)
    drawing.text(525, 26, "a group of lanes each", bold=True)
    slots = [place for place, (_, row, _) in enumerate(work) if lengths[row] > most]
    for place in range(len(work)):
        y = 53 + place * 27
        drawing.line((478, y), (520, y))
        drawing.box(525, y - 13, "partial" if place in slots else "result", "white", 70)
    for place in slots:
        drawing.line((595, 53 + place * 27), (622, 53 + place * 27), (622, 133), (640, 133))
    drawing.box(643, 120, "result", "white", 70)
    drawing.text(635, 165, "a second kernel")
    drawing.text(635, 182, "adds in order")
    return drawing.svg()


def blocks() -> str:
    """A window of 8 rows, its vectors, their bitmaps."""
    entries = {(0, 1), (1, 2), (2, 1), (2, 2), (7, 4)}
    vectors = (1, 2, 4)
    drawing = Drawing(720, 300, "A window of eight rows becomes columns and bitmaps")
    drawing.text(20, 26, "window: 8 rows of the matrix", bold=True)
    for j in range(6):
        drawing.text(73 + j * CELL, 56, j, "middle")
    for i in range(8):
        drawing.text(42, 82 + i * CELL, i, "middle")
    drawing.cells(
        60,
        64,
        [["x" if (i, j) in entries else "" for j in range(6)] for i in range(8)],
        lambda i, j: COLOURS[vectors.index(j)] if (i, j) in entries else ("white" if j in vectors else FAINT),
    )
    drawing.line((225, 168), (265, 168))
    drawing.text(280, 26, "non-zero vectors", bold=True)
    for place, j in enumerate(vectors):
        drawing.text(303 + place * 34, 56, j, "middle")
        for i in range(8):
            filled = (i, j) in entries
            drawing.box(290 + place * 34, 64 + i * CELL, int(filled), COLOURS[place] if filled else "white")
    drawing.line((400, 168), (440, 168))
    drawing.text(455, 26, "quad of 4 vectors, 16 bytes", bold=True)
    drawing.text(455, 62, "columns, 3 bytes each")
    drawing.text(455, 142, "bitmaps, 1 byte each")
    for k in range(4):
        known = k < len(vectors)
        mask = sum(1 << i for i in range(8) if known and (i, vectors[k]) in entries)
        fill = COLOURS[k] if known else FAINT
        drawing.box(455 + k * 50, 72, vectors[k] if known else vectors[0], fill, 50)
        drawing.box(455 + k * 50, 152, f"0x{mask:02x}", fill, 50)
    drawing.text(455, 215, "grey: padding, repeats the first")
    drawing.text(455, 233, "column with an empty bitmap")
    drawing.text(455, 262, "no value, no row index is stored; up to")
    drawing.text(455, 280, "four quads of a window make a block")
    return drawing.svg()


def lanes() -> str:
    """The lanes of a warp while they load, and as the tensor cores have them."""
    drawing = Drawing(760, 560, "Which lane holds what, from load to result")
    drawing.text(20, 26, "1  load: 8 neighbouring lanes read one row of x, up to 16 bytes each", bold=True)
    for i in range(4):
        drawing.text(20, 62 + i * CELL, f"row of vector {4 * i}")
        for j in range(8):
            drawing.box(125 + j * 40, 44 + i * CELL, 8 * i + j, COLOURS[i], 40)
    drawing.text(465, 62, "numbers: lanes of a warp")
    drawing.text(465, 88, "the next load reads vectors 1, 5, 9, 13,")
    drawing.text(465, 106, "and so on: four loads for a block,")
    drawing.text(465, 124, "all on their way at once")
    drawing.text(20, 185, "2  shuffle, and bitmaps become the operand A^T", bold=True)
    for v in range(16):
        drawing.text(138 + v * CELL, 212, v, "middle")
    drawing.text(20, 212, "vector")
    for r in range(8):
        drawing.text(20, 238 + r * CELL, f"row {r} (bit {r})")
    drawing.cells(
        125, 220, [[4 * r + v // 4 for v in range(16)] for r in range(8)], lambda r, v: COLOURS[v // 4]
    )
    drawing.text(560, 238, "lane 4g + t: bit g of the")
    drawing.text(560, 256, "four vectors of thread t")
    drawing.text(560, 282, "colours: t = 0, 1, 2, 3")
    drawing.text(20, 462, "3  result C^T = X^T A^T", bold=True)
    for r in range(8):
        drawing.text(268 + r * CELL, 462, r, "middle")
    drawing.text(225, 462, "row", "end")
    for place, g in enumerate((0, 1, 7)):
        drawing.text(
            20, 488 + place * CELL, f"features of piece {g}" + (" (of 0 to 7)" if place == 2 else "")
        )
        for r in range(8):
            drawing.box(255 + r * CELL, 470 + place * CELL, 4 * g + r // 2, COLOURS[r // 2])
    drawing.text(480, 488, "lane 4g + t: rows 2t and 2t + 1,")
    drawing.text(480, 506, "the features of piece g;")
    drawing.text(480, 524, "shuffled back, stored 16 bytes at a time")
    return drawing.svg()


def attention() -> str:
    """What the steps of attention keep, one after the other and fused."""
    drawing = Drawing(760, 270, "Attention, fused and step by step")
    drawing.text(20, 26, "step by step: numbers of every edge and head between the kernels", bold=True)
    steps = (("sddmm", "scores"), ("softmax", "weights"), ("dropout", "weights"), ("spmm", "result"))
    for place, (kernel, kept) in enumerate(steps):
        x = 20 + 188 * place
        drawing.box(x, 50, kernel, COLOURS[place], 70)
        drawing.line((x + 70, 63), (x + 90, 63))
        drawing.box(x + 90, 50, kept, FAINT if kept != "result" else "white", 70)
        if kept != "result":
            drawing.line((x + 160, 63), (x + 186, 63))
    drawing.text(20, 122, "fused: blocks of neighbours pass through registers and shared memory", bold=True)
    drawing.box(20, 145, "block of neighbours", "white", 140)
    drawing.line((160, 158), (190, 158))
    x = 190
    for place, (step, wide) in enumerate(
        (("scores", 70), ("softmax so far", 120), ("dropout", 80), ("sum so far", 120))
    ):
        drawing.box(x, 145, step, COLOURS[place], wide)
        x += wide
    drawing.line((x, 158), (x + 40, 158))
    drawing.box(x + 40, 145, "result", "white", 70)
    drawing.line((450, 171), (450, 195), (90, 195), (90, 173))
    drawing.text(270, 213, "next block", "middle")
    drawing.line((325, 171), (325, 233), (620, 233))
    drawing.text(626, 228, "log of the sum:")
    drawing.text(626, 246, "one per row, head")
    return drawing.svg()


DRAWINGS = {draw.__name__: draw for draw in (adjacency, slices, blocks, lanes, attention)}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        Path(__file__).with_name(f"{name}.svg").write_text(draw())
