"""Lists the pages of all PDF documents in a folder: python jobs/list_pages.py FOLDER pages.parquet.

Each page is a row. The columns are `path`, relative to the folder of the Parquet file, and `page`, counted
from 1. A document that cannot be opened is named on standard error, and has one row, which fails later.
"""

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pypdfium2


def pages_of(document: Path) -> int:
    """Return the number of pages of a document; 1 where it cannot be opened."""
    try:
        opened = pypdfium2.PdfDocument(document)
    except (pypdfium2.PdfiumError, OSError) as failure:
        print(f"{document}: {failure}", file=sys.stderr)
        return 1
    count = len(opened)
    opened.close()
    return max(1, count)


def main(folder: Path, table: Path) -> None:
    """Write the table."""
    documents = sorted(path for path in folder.rglob("*") if path.suffix.lower() == ".pdf")
    rows = [(path, page) for path in documents for page in range(1, pages_of(path) + 1)]
    begin = table.resolve().parent
    whole = [path.resolve() for path, _ in rows]
    names = [str(path.relative_to(begin)) if path.is_relative_to(begin) else str(path) for path in whole]
    schema = pa.schema([("path", pa.string()), ("page", pa.int64())])
    pq.write_table(pa.table([names, [page for _, page in rows]], schema=schema), table)
    print(f"{len(rows)} pages of {len(documents)} documents in {table}")


if __name__ == "__main__":
    if len(sys.argv) != len(("program", "folder", "table")):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
