"""Write the pages of reference: what `make docs-reference` does."""

from docs.tools.reference.pages import FOLDER, pages


def main() -> None:
    """Write each page."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    made = pages()
    for name, text in made.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    print(f"{len(made)} pages in {FOLDER}")


if __name__ == "__main__":
    main()
