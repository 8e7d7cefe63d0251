"""Plain text in columns, for output that is read in a terminal, a log or a README."""

from collections.abc import Container, Sequence


def aligned(rows: Sequence[Sequence[str]], *, right: Container[int] = (), rule: bool = False) -> str:
    """Rows of cells as lines, each column as wide as its widest cell; columns numbered in ``right`` stand to the right.

    With ``rule`` a line is drawn under the first row.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(row, widths, right) for row in rows]
    if rule:
        lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _line(row: Sequence[str], widths: Sequence[int], right: Container[int]) -> str:
    cells = (
        cell.rjust(width) if column in right else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join(cells).rstrip()
