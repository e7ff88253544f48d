"""Write the pages of reference: what `make docs-reference` does."""

from docs.tools.reference.pages import FOLDER, pages


def main() -> None:
    """Write each page."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    texts = pages()
    for name, text in texts.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    print(f"{len(texts)} pages in {FOLDER}")


if __name__ == "__main__":
    main()
