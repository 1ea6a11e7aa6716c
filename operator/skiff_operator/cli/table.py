"""Plain tables of a terminal, in kubectl's style: columns that are as wide as their longest cell."""

from collections.abc import Iterable, Sequence


def render(head: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Return a table; the columns of the indices in `right` are aligned to the right."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(head))]
    return "\n".join(
        "   ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
